"""Which mutations a run makes."""

import random
from collections import defaultdict

from tests.vllm.params import fields, mutations, ranks
from tests.vllm.params.mutations import Mutation


def one_rank(servers: int) -> list[Mutation]:
    """For servers of one rank; so many of them prefill."""
    found = [
        *mutations.intact(servers), *fields.fields(), *fields.tickets(), *fields.shape(),
        *fields.block_ids(servers), *mutations.swaps_of_two(servers), *mutations.swaps_of_three(servers),
        *mutations.salts(), *mutations.batches(),
    ]  # fmt: skip
    return [one for one in found if max(one.servers) < servers]


def two_ranks() -> list[Mutation]:
    """For servers of two ranks, of which one prefills."""
    return ranks.ranks()


# What gave wrong tokens while pages were named by their ids, and nothing tied a grant to a prompt.
KNOWN = (
    "tickets and ids of a prompt (other) on server 0",
    "tickets and ids of a prompt (shares) on server 0",
    "remote_block_ids: reversed",
    "remote_block_ids: the first repeated",
    "reversed, of another prompt with its tickets on server 0",
    "rank 0 and 1 of a prompt (other), with its ids",
    "tickets: their texts swapped",
    "tickets: their rank numbers swapped",
)


def known(found: list[Mutation]) -> list[Mutation]:
    """Those of `KNOWN` that are among the found ones."""
    return [one for one in found if one.name in KNOWN]


def choose(catalogue: list[Mutation], count: int, rng: random.Random) -> list[Mutation]:
    """So many of them (all, and from the beginning again, where there are fewer), in turn from each family,
    in which the order is random."""
    families: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in catalogue:
        families[mutation.family].append(mutation)
    chosen: list[Mutation] = []
    while len(chosen) < count:
        left = [rng.sample(members, len(members)) for members in families.values()]
        while any(left) and len(chosen) < count:
            for members in left:
                if members and len(chosen) < count:
                    chosen.append(members.pop())
    return chosen
