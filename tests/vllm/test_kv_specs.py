"""The shapes of `kvik.shapes` beside vLLM's own, for each preset and for other ways to write a config.json.

What is vLLM's own: it reads the `config.json`, builds the model's layers (its model classes, on torch's
"meta" device, without weights), asks each attention layer and its CPU backend for a KV-cache specification,
makes the KV-cache configuration of these, resolves the physical layout and allocates the tensors, 5 KV blocks
of them; tensor parallelism 2 is two processes in vLLM's own process groups. What is not: no engine runs
around it (the steps are called one by one, as `EngineCore` and the CPU worker call them), and KV blocks have
the tokens that vLLM chooses on a CPU. Strides and offsets are read from the tensors by kvik's connector.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvik.roles.processes import Process
from kvik.shapes import ModelShape, ShapeError, presets
from tests.vllm.forked import ForkedProgram, ForkParent
from tests.vllm.kv_specs import HEADS, register_in_process

LIMIT = 900.0  # seconds; 10 where nothing else runs
pytestmark = pytest.mark.timeout(LIMIT + 60)


@dataclass(frozen=True)
class Case:
    """A configuration, what vLLM is told beside it, and what kvik is told."""

    name: str
    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)


_FALCON = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
}
_MISTRAL = next(dict(preset.config) for preset in presets() if preset.name == "mistral-7b")
_GEMMA_2 = {  # every second layer has the window
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
_NO_GROUPS = {"disable_hybrid_kv_cache_manager": True}
CASES = [
    *(
        # vLLM turns float32 of a configuration into half precision, unless it is told.
        Case(preset.name, dict(preset.config), {"dtype": preset.config["torch_dtype"]})
        for preset in presets()
    ),
    Case("fp8", _MISTRAL, {"kv_cache_dtype": "fp8"}, {"dtype": "fp8"}),
    Case("some layers with a window, kept whole", _GEMMA_2, _NO_GROUPS, {"whole_context": True}),
    Case(
        "multi-query by a flag",
        {
            **_FALCON,
            "hidden_size": 4544,
            "num_attention_heads": 142,  # 71 in the published model, which no two ranks can share
            "num_hidden_layers": 4,
            "new_decoder_architecture": False,
        },
    ),
    Case(
        "flag overruled, num_kv_heads",
        {
            **_FALCON,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "num_hidden_layers": 4,
            "new_decoder_architecture": True,
        },
    ),
    Case(
        "GPT-2 names, multi-query by a flag",
        {
            "architectures": ["GPTBigCodeForCausalLM"],
            "model_type": "gpt_bigcode",
            "multi_query": True,
            "n_embd": 6144,
            "n_head": 48,
            "n_inner": 24576,
            "n_layer": 4,
            "n_positions": 8192,
            "vocab_size": 49152,
            "torch_dtype": "bfloat16",
        },
    ),
]
Answers = dict[int, list[list[dict[str, Any]]]]  # by tensor-parallel size and rank


@dataclass(frozen=True)
class Asked:
    """A process of vLLM that answers all questions, and the file with what it says."""

    process: Process
    said: Path

    @classmethod
    def start(cls, parent: ForkParent, rank: int, tp: int, folder: Path) -> "Asked":
        """Ask as one rank; the ranks of one size meet by a file in the folder."""
        name = f"rank-{rank}-of-{tp}"
        questions, said, log = (folder / f"{name}.{kind}" for kind in ("ask", "said", "log"))
        lines = [json.dumps({"config": case.config, "engine": case.engine}) for case in CASES]
        questions.write_text("\n".join(lines) + "\n")
        arguments = [str(rank), str(tp), str(folder / f"meet-{tp}"), str(questions), str(said)]
        return cls(ForkedProgram(parent, name, "tests.vllm.kv_specs", arguments, log), said)

    def answers(self) -> list[dict[str, Any]]:
        """Wait for its end; the answers in the order of the questions."""
        status = self.process.wait(LIMIT)
        assert status == 0, f"vLLM could not answer (status {status}):\n{self.process.tail()}"
        found = [json.loads(line) for line in self.said.read_text().splitlines()]
        assert len(found) == len(CASES) + len(HEADS)
        return found


@pytest.fixture(scope="module")
def answers(fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """What vLLM says of every case, and then of heads: alone, and on each of two ranks."""
    folder = tmp_path_factory.mktemp("kv-specs")
    asked: dict[int, list[Asked]] = {1: [], 2: []}
    try:
        for tp, ranks in asked.items():
            ranks.extend(Asked.start(fork_parent, rank, tp, folder) for rank in range(tp))
        yield {tp: [rank.answers() for rank in ranks] for tp, ranks in asked.items()}
    finally:
        for rank in (*asked[1], *asked[2]):
            rank.process.stop()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_specification(answers: Answers, index: int, tp: int) -> None:
    """Layers, heads, sizes and bytes of a KV block are vLLM's, on every rank."""
    shape = ModelShape.from_config(CASES[index].config, **CASES[index].shape)
    for rank, said in enumerate(answers[tp]):
        vllm = said[index]
        ours = shape.of_rank(vllm["block_tokens"], tp, rank)
        check = {
            "kind": "MLAAttentionSpec" if shape.attention == "mla" else "FullAttentionSpec",
            "layers": shape.layers,
            "kv_heads": len(shape.heads_of_rank(tp, rank)),
            "head_size": shape.head_size,
            "value_size": shape.value_size,
            "element_bytes": shape.element_bytes,
            "page_size_bytes": ours.block_bytes,
        }
        assert check == {key: vllm[key] for key in check}
        assert shape.page_bytes(vllm["block_tokens"], tp) == vllm["layers"] * vllm["page_size_bytes"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_memory(answers: Answers, index: int, tp: int) -> None:
    """The tensors that vLLM allocates lie as ours: [layers][blocks][heads][tokens][content], densely."""
    shape = ModelShape.from_config(CASES[index].config, **CASES[index].shape)
    for rank, said in enumerate(answers[tp]):
        vllm = said[index]
        ours = shape.of_rank(vllm["block_tokens"], tp, rank)
        stride = ours.layer_stride(vllm["blocks"])
        # With one head, heads before tokens and tokens before heads are the same bytes.
        assert vllm["layout"] in ("LBHNC", "LBNHC" if len(ours.heads) == 1 else "")
        assert vllm["order"].startswith("H")  # heads outermost; inside of one, each kernel has its order
        check = {
            "tensor_heads": len(ours.heads),
            "tensor_tokens": ours.page_tokens,
            "tensor_content": ours.content,
            "block_bytes": ours.block_bytes,
            "block_stride": ours.block_bytes,
            "layer_offsets": [layer * stride for layer in range(ours.layers)],
            "nbytes": ours.layout(vllm["blocks"]).nbytes,
        }
        assert check == {key: vllm[key] for key in check}


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_parameters(answers: Answers, index: int) -> None:
    """The estimate of parameters is within 0.2 % of the model that vLLM builds."""
    shape = ModelShape.from_config(CASES[index].config, **CASES[index].shape)
    if CASES[index].config["model_type"] in ("falcon", "gpt_bigcode", "gemma2"):
        assert shape.parameters is None
    else:
        assert shape.parameters == pytest.approx(answers[1][0][index]["parameters"], rel=0.002)


@pytest.mark.parametrize("tp", [1, 2])
def test_which_heads(answers: Answers, tp: int) -> None:
    """Each rank keeps the heads that vLLM's projection loads there."""
    for rank, said in enumerate(answers[tp]):
        for vllm in said[len(CASES) :]:
            shape = ModelShape(
                name="heads",
                layers=1,
                kv_heads=vllm["kv_heads"],
                head_size=4,
                query_heads=vllm["query_heads"],
            )
            assert list(shape.heads_of_rank(tp, rank)) == vllm["kept"]


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: str(preset.name))
def test_tensor_parallel_sizes(preset: Any, tmp_path: Path) -> None:
    """Up to 16 ranks: the heads a rank are those of vLLM's ModelConfig, which refuses what we refuse."""
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed.utils import divide

    register_in_process(set(preset.config["architectures"]))
    (tmp_path / "config.json").write_text(json.dumps(dict(preset.config)))
    vllm = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    shape = ModelShape.from_config(tmp_path)
    for tp in range(1, 17):
        parallel = ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp")
        try:
            vllm.verify_with_parallel_config(parallel)
        except ValueError:
            with pytest.raises(ShapeError, match="attention heads"):
                shape.check_tp(tp)
            continue
        if shape.attention == "gqa" and tp % shape.kv_heads and shape.kv_heads % tp:
            # ModelConfig lets it pass; the projection of K and V divides so, and fails.
            with pytest.raises(AssertionError):
                divide(max(tp, shape.kv_heads), min(tp, shape.kv_heads))
            with pytest.raises(ShapeError, match="KV heads"):
                shape.check_tp(tp)
            continue
        assert len(shape.heads_of_rank(tp, tp - 1)) == vllm.get_num_kv_heads(parallel)
        assert shape.head_size == vllm.get_head_size()
