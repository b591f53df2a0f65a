"""Asks vLLM what each layer of a model keeps of a request; one JSON line a question.

    python -m tests.vllm.kv_windows RENDEZVOUS_FILE QUESTIONS_FILE ANSWERS_FILE

Questions are those of `tests.vllm.kv_specs`, with `"tokens"`: numbers of computed tokens. Answers are what
each layer's own specification says of its block, and how many blocks vLLM's manager for such layers keeps of
a request. No engine runs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.vllm.kv_specs import parallel, register_in_process


def main(rendezvous: str, asked: str, answers: str) -> None:
    """Answer the questions of a file in another one."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).name
    questions = [json.loads(line) for line in Path(asked).read_text().splitlines()]
    register_in_process({name for question in questions for name in question["config"]["architectures"]})
    with parallel(0, 1, rendezvous), Path(answers).open("w") as out:
        for question in questions:
            print(json.dumps(_answer(question)), file=out)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(question["config"]))
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            num_gpu_blocks_override=5,
            **question["engine"],
        ).create_engine_config()
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), torch.device("meta"), set_default_torch_dtype(dtype):
            initialize_model(vllm_config)
        specs = get_kv_cache_spec(vllm_config)
    layers = [_layer(name, spec, question["tokens"]) for name, spec in specs.items()]
    return {"layers": sorted(layers, key=lambda layer: int(layer["index"]))}


def _layer(name: str, spec: Any, tokens: list[int]) -> dict[str, Any]:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

    window = getattr(spec, "sliding_window", None)
    manager = FullAttentionManager if window is None else SlidingWindowManager
    state = SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
    kept = []
    for count in tokens:
        skipped = manager.get_num_skipped_tokens(state, count)
        kept.append(-(-count // spec.block_size) - skipped // spec.block_size)
    return {
        "index": next(part for part in name.split(".") if part.isdigit()),
        "kind": type(spec).__name__,
        "window": window,
        "block_tokens": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        "kept": kept,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
