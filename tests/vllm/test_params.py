"""Changed `kv_transfer_params` through decode's own port: a sample of `python -m tests.vllm.params`."""

import random
from itertools import chain

import pytest

from tests.python.peers import random_seed
from tests.vllm.conftest import Reference, expected
from tests.vllm.pairs import Pair
from tests.vllm.params import catalogue, table
from tests.vllm.params.mutations import Mutation
from tests.vllm.params.trial import TOKENS, Scene, attempt, prompts_of

SAMPLE, SAMPLE_OF_RANKS = 20, 6
TIME = pytest.mark.timeout(600)


def check(
    pair: Pair, reference: Reference, known: list[Mutation], others: list[Mutation], count: int
) -> None:
    """Those that are known to have led to wrong KV once, and some of the others."""
    rng = random.Random(random_seed())
    scene = Scene([pair.prefill], pair.decode, pair.reports, reference)
    # Those whose load waits for a grant that is not there take as long as a load may: they are left out here.
    chosen = [*known, *catalogue.choose([one for one in others if not one.slow], count, rng)]
    seeds = [rng.getrandbits(64) for _ in chosen]
    # The prompts are the first that an attempt draws.
    drawn = [prompts_of(one.prompts, random.Random(seed)) for one, seed in zip(chosen, seeds, strict=True)]
    print(table.HEAD)
    rows = []
    with expected(reference, [*chain(*drawn)], TOKENS):
        for mutation, seed in zip(chosen, seeds, strict=True):
            rows.append(attempt(scene, mutation, random.Random(seed)))
            print(table.line(rows[-1]))
    print(*table.summary(rows), sep="\n")
    assert [(row.mutation.family, row.mutation.name, row.wrong) for row in rows if row.wrong] == []
    refused = {name for row in rows for name in row.names}
    assert "content_mismatch (load)" in refused, "no owner has refused anything: the mutations test nothing"


@TIME
@pytest.mark.parametrize("pair", ["prefix-cache"], indirect=True)
def test_no_parameters_lead_to_wrong_kv(pair: Pair, reference: Reference) -> None:
    """One rank each: fields, shapes, block ids, and parts of other prompts' parameters."""
    mutations = catalogue.one_rank(servers=1)
    check(pair, reference, catalogue.known(mutations), mutations, SAMPLE)


@TIME
@pytest.mark.parametrize("pair", ["tp2"], indirect=True)
def test_no_tickets_of_other_ranks_lead_to_wrong_kv(pair: Pair, reference: Reference) -> None:
    """Two ranks each: tickets swapped between ranks, and between prompts rank by rank."""
    mutations = catalogue.two_ranks()
    check(pair, reference, catalogue.known(mutations), mutations, SAMPLE_OF_RANKS)
