"""Asks vLLM how it keeps the KV of a model; one process a tensor-parallel rank, one JSON line a question.

    python -m tests.vllm.kv_specs RANK TP RENDEZVOUS_FILE QUESTIONS_FILE ANSWERS_FILE

A question is a line `{"config": {...}, "engine": {...}}`: the content of a `config.json`, and arguments for
vLLM's `EngineArgs`. No weights, no tokenizer, no download: vLLM builds its own model on torch's "meta"
device, where tensors have shapes and no memory.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCKS = 5  # KV blocks to allocate: enough for one short request, and for strides to show
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1))  # attention heads and KV heads of projections to ask about


def main(rank: int, tp: int, rendezvous: str, asked: str, answers: str) -> None:
    """Answer the questions of a file in another one."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    questions = [json.loads(line) for line in Path(asked).read_text().splitlines()]
    register_in_process({name for question in questions for name in question["config"]["architectures"]})
    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).name  # as its executor names a group of workers
    with parallel(rank, tp, rendezvous), Path(answers).open("w") as out:
        for question in questions:
            print(json.dumps(_answer(question["config"], question["engine"], tp)), file=out)
        for query_heads, kv_heads in HEADS:
            print(json.dumps(_heads_kept(query_heads, kv_heads)), file=out)


def register_in_process(architectures: set[str]) -> None:
    """Give vLLM its own model classes, which it else looks at in a process of their own (15 s each)."""
    from vllm import ModelRegistry

    for name in sorted(architectures):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextlib.contextmanager
def parallel(rank: int, tp: int, rendezvous: str) -> Iterator[None]:
    """vLLM's process groups, over gloo, as its CPU worker makes them."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(tp, rank, f"file://{rendezvous}", rank, "gloo")
        parallel_state.initialize_model_parallel(tp, backend="gloo")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _answer(config: dict[str, Any], engine: dict[str, Any], tp: int) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from kvik.vllm.connector import _model_kv

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="mp",
            enforce_eager=True,
            max_model_len=64,
            num_gpu_blocks_override=BLOCKS,
            **engine,
        ).create_engine_config()
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), torch.device("meta"), set_default_torch_dtype(dtype):
            model = initialize_model(vllm_config)
        plan, layout = _plan(vllm_config, get_kv_cache_spec(vllm_config))
    (group,) = plan.kv_cache_groups  # no question here is about a model with several
    spec = group.kv_cache_spec
    return {
        "kind": type(spec).__name__,
        "layers": len(group.layer_names),
        "block_tokens": spec.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "value_size": spec.head_size_v,
        "element_bytes": spec.dtype.itemsize,
        "page_size_bytes": spec.page_size_bytes,
        "layout": layout.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **_memory(plan, layout, _model_kv(vllm_config, plan.kv_cache_groups[0])),
    }


def _plan(vllm_config: Any, specs: dict[str, Any]) -> tuple[Any, Any]:
    """The KV-cache configuration and physical layout, in the order in which vLLM's engine core makes them."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import WorkerBase

    worker = WorkerBase.__new__(WorkerBase)  # its two methods about layouts use nothing else
    worker.vllm_config = vllm_config
    supported = worker.get_supported_kv_cache_layouts()
    layout = resolve_kv_cache_layout(vllm_config, [supported], specs.values())
    worker.set_kv_cache_layout(layout.name)
    (plan,) = get_kv_cache_configs(vllm_config, [specs], [1 << 40])
    return plan, layout


def _memory(plan: Any, layout: Any, model: Any) -> dict[str, Any]:
    """What kvik's connector finds in the tensors that vLLM allocates for a KV-cache configuration."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvik.vllm.layout import inspect

    memory = inspect(allocate_kv_cache(plan, torch.device("cpu"), layout), model)
    return {
        "blocks": memory.num_blocks,
        "nbytes": memory.nbytes,
        "block_stride": memory.block_stride,
        "layer_offsets": memory.layer_offsets,
        "tensor_heads": memory.shape.heads,
        "tensor_tokens": memory.shape.block_tokens,
        "tensor_content": memory.shape.content,
        "order": memory.shape.order,
        "block_bytes": memory.shape.block_bytes,
    }


def _heads_kept(query_heads: int, kv_heads: int) -> dict[str, Any]:
    """Which KV heads vLLM's projection keeps on this rank: it loads weights whose rows say their head."""
    import torch
    from vllm.model_executor.layers.linear import QKVParallelLinear

    size, hidden = 4, 8
    layer = QKVParallelLinear(hidden, size, query_heads, kv_heads, bias=False, params_dtype=torch.float32)
    rows = torch.arange(kv_heads, dtype=torch.float32).repeat_interleave(size)
    layer.weight_loader(layer.weight, rows[:, None].expand(-1, hidden).contiguous(), "k")
    keys = layer.weight[layer.num_heads * size : (layer.num_heads + layer.num_kv_heads) * size, 0]
    return {"query_heads": query_heads, "kv_heads": kv_heads, "kept": [int(row) for row in keys[::size]]}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
