"""The same KV divided differently: other ranks, other pages, MLA. Equal tokens, and exactly the bytes."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvik.demo.reports import Load, ReportReader
from kvik.roles.processes import HttpServer
from kvik.shapes import ModelShape
from tests.python.emulator import servers
from tests.python.emulator.servers import Spec, prompt_of, tokens_of

TOKENS = 6
LENGTHS = [17, 40, 333]
GQA = "name=gqa,layers=6,kv_heads=4,head_size=32,dtype=bfloat16,vocab_size=32000,max_context=4096"
MLA = (
    "name=mla,layers=6,kv_heads=1,head_size=96,attention=mla,dtype=bfloat16,vocab_size=32000,max_context=4096"
)


@dataclass(frozen=True)
class Case:
    """What differs: a model, and (ranks, tokens of a page) of either side."""

    shape: str
    prefill: tuple[int, int]
    decode: tuple[int, int]

    def __str__(self) -> str:
        name = ModelShape.resolve(self.shape).name
        (tp, tokens), (to_tp, to_tokens) = self.prefill, self.decode
        return f"{name}-tp{tp}to{to_tp}-page{tokens}to{to_tokens}"


CASES = [
    Case(GQA, (4, 16), (2, 16)),
    Case(GQA, (2, 16), (4, 16)),
    Case(GQA, (8, 16), (2, 16)),
    Case(GQA, (1, 16), (1, 32)),
    Case(GQA, (1, 32), (1, 16)),
    Case(GQA, (2, 32), (4, 16)),
    Case(MLA, (2, 16), (4, 16)),
    Case(MLA, (4, 32), (1, 16)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_divided_differently(tmp_path: Path, case: Case) -> None:
    shape = ModelShape.resolve(case.shape)
    report = tmp_path / "loads.jsonl"
    one = ("--model-shape", case.shape)
    specs = [
        Spec("alone", options=one),
        Spec("prefill", "prefill", (*one, *_size(case.prefill))),
        Spec("decode", "decode", (*one, *_size(case.decode)), report),
    ]
    with servers.servers(tmp_path, *specs) as (alone, prefill, decode):
        for length in LENGTHS:
            prompt = prompt_of(length, seed=length, vocab=shape.vocab_size)
            loads = _hand_over(alone, prefill, decode, ReportReader(report), prompt, case, shape)
            _check_bytes(loads, case, shape, length)
            _print(loads, case, shape, length)
        servers.wait_used(prefill, 0.0)
        servers.wait_used(decode, 0.0)


def _size(side: tuple[int, int]) -> tuple[str, ...]:
    return ("--tp", str(side[0]), "--page-tokens", str(side[1]))


def _hand_over(
    alone: HttpServer,
    prefill: HttpServer,
    decode: HttpServer,
    reports: ReportReader,
    prompt: list[int],
    case: Case,
    shape: ModelShape,
) -> list[Load]:
    computed = servers.metric(decode, servers.COMPUTED)
    more = {"model": shape.name}
    truth = tokens_of(alone, prompt, TOKENS, **more)
    params = servers.prefill_by_hand(prefill, prompt, **more)
    assert tokens_of(decode, prompt, TOKENS, kv_transfer_params=params, **more) == truth
    assert servers.metric(decode, servers.COMPUTED) - computed == 1, decode.tail()
    mine, theirs = (len(shape.heads_of_rank(tp, 0)) for tp in (case.decode[0], case.prefill[0]))
    loads = reports.wait(case.decode[0] * max(1, mine // theirs), servers.LIMIT)
    assert {load.outcome for load in loads} == {"loaded"}
    return loads


def _check_bytes(loads: list[Load], case: Case, shape: ModelShape, length: int) -> None:
    """Every decode rank has got the KV of its own heads, once; tokens are rounded up to a part of a page."""
    part = min(case.prefill[1], case.decode[1])
    tokens = -(-length // part) * part
    for rank in range(case.decode[0]):
        mine = sum(load.bytes for load in loads if load.rank == rank)
        assert mine == tokens * shape.kv_bytes_per_token(case.decode[0]), (rank, loads)


def _print(loads: list[Load], case: Case, shape: ModelShape, length: int) -> None:
    """What was moved, beside the pieces that copying part by part, layer by layer and head by head takes."""
    row = min(case.prefill[1], case.decode[1]) * shape.content * shape.element_bytes
    naive = sum(load.bytes for load in loads) // row
    extents = sum(load.extents for load in loads)
    assert 0 < extents <= naive
    print(
        f"{case!s:32} {length:5} tokens {sum(load.bytes for load in loads):9} bytes "
        f"{len(loads):3} transfers {extents:5} extents, naive {naive:5}"
    )
