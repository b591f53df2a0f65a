"""Hands KV on GPUs over, as vLLM lays it out there: vLLM's planning and views, kvik's connector, and the
driver of `tests/python/gpu.py`. No GPU and no CUDA build of torch are needed.

    python -m tests.vllm.gpu_kv RENDEZVOUS_FILE CHECK

What is vLLM's own: the plan of the KV cache, for each physical layout that it knows, and the views that it
gives to connectors. What stands in: the tensors say that they are on a GPU, and their addresses are of memory
of the driver's, which no processor touches.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvik.handover.memory import KvMemory
from kvik.vllm import layout as connector_layout
from tests.python.gpu import Array, Cuda, driver
from tests.python.gpu_handover import GpuSide, a_prompt, check_order, hand_over
from tests.python.handover_harness import request
from tests.vllm import kv_specs

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 128, "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "torch_dtype": "float32",
}  # fmt: skip


class OnDevice:
    """A tensor of the host that says it lies at `base` on a GPU, as far as a layout looks at it."""

    def __init__(self, tensor: Any, base: int) -> None:
        self.tensor, self.base, self.device = tensor, base, SimpleNamespace(type="cuda", index=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def data_ptr(self) -> int:
        return int(self.tensor.data_ptr() - self.tensor.untyped_storage().data_ptr() + self.base)

    def untyped_storage(self) -> Any:
        nbytes = self.tensor.untyped_storage().nbytes()
        return SimpleNamespace(data_ptr=lambda: self.base, nbytes=lambda: nbytes)


@dataclasses.dataclass
class Server:
    """How one server has its KV: the tensors that vLLM allocates, and what its configuration says of them."""

    tensors: dict[str, Any]
    model: Any


def side(cuda: Cuda, role: str, server: Server) -> GpuSide:
    """A server whose tensors say that they are on the driver's GPU."""
    storage = next(iter(server.tensors.values())).untyped_storage()

    def make(array: Array) -> KvMemory:
        tensors = {name: OnDevice(tensor, array.at) for name, tensor in server.tensors.items()}
        return connector_layout.inspect(tensors, server.model)

    return GpuSide(cuda, role, storage.nbytes(), make)


def servers(config: dict[str, Any], backend: str) -> dict[str, Server]:
    """A model's KV in every physical layout that vLLM knows, by the layout's name."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvik.vllm.connector import _model_kv

    found = {}
    for layout in KVCacheLayout:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            vllm_config = EngineArgs(
                model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64,
                block_size=16, num_gpu_blocks_override=12, gpu_memory_utilization=0.5,
            ).create_engine_config()  # fmt: skip
            dtype = vllm_config.model_config.dtype
            with set_current_vllm_config(vllm_config), torch.device("meta"), set_default_torch_dtype(dtype):
                model = initialize_model(vllm_config)
                specs = get_kv_cache_spec(vllm_config)
                vllm_config.cache_config.kv_cache_layout = layout.name
                (plan,) = get_kv_cache_configs(vllm_config, [specs], [1 << 40])
            del model
        (group,) = plan.kv_cache_groups
        kv = dataclasses.replace(_model_kv(vllm_config, group), backends=(backend,))
        found[layout.name] = Server(allocate_kv_cache(plan, torch.device("cpu"), layout), kv)
    return found


def check_layouts(cuda: Cuda) -> None:
    """Between all layouts with the same order within a KV block; the orders of all."""
    number = 0
    for config, backend in ((LLAMA, "FLASH_ATTN"), (DEEPSEEK, "FLASHMLA")):
        sides = {
            name: (side(cuda, "prefill", server), side(cuda, "decode", server))
            for name, server in servers(config, backend).items()
        }
        orders = {name: prefill.shape.order for name, (prefill, _) in sides.items()}
        tokens_first = [] if config is DEEPSEEK else [name for name in orders if "NH" in name]
        assert orders == {name: "NHC" if name in tokens_first else "HNC" for name in orders}, orders
        assert len(orders) >= 6, orders
        for one, (prefill, _) in sides.items():
            for other, (_, decode) in sides.items():
                number += 1
                if orders[one] == orders[other]:
                    print(f"{backend}: {one} to {other}", flush=True)
                    hand_over(prefill, decode, number)
                else:
                    check_refused(prefill, decode, number)
        for pair in sides.values():
            for one_side in pair:
                one_side.close()


def check_refused(prefill: GpuSide, decode: GpuSide, number: int) -> None:
    """Decode wants nothing of a layout whose order within a KV block is another one."""
    tokens = a_prompt(prefill, number)
    params = prefill.offer(tokens, [7, 2, 9], f"p-{number}")
    wanted = request(f"d-{number}", tokens, params)
    assert decode.admit(wanted, [4, 1, 3]) == 0
    assert decode.scheduler.take_counters()["recomputed_shape_mismatch"] == 1
    assert not prefill.step().received
    assert not decode.step().received


def main(rendezvous: str, check: str) -> None:
    """Run one check, in a process that has the driver."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).name
    kv_specs.register_in_process({"LlamaForCausalLM", "DeepseekV2ForCausalLM"})
    cuda = driver()
    with kv_specs.parallel(0, 1, rendezvous):
        if check == "layouts":
            return check_layouts(cuda)
        server = servers(LLAMA, "FLASH_ATTN")["LBHNC"]
        prefill, decode = side(cuda, "prefill", server), side(cuda, "decode", server)
        check_order(cuda, prefill, decode)
        prefill.close()
        decode.close()
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
