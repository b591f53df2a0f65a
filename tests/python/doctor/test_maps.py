"""NICs of ranks: the map is compared with the best of all maps of small machines."""

import itertools
import random
from collections import Counter

import pytest

from kvik.doctor import nics_for_ranks
from kvik.doctor.model import Machine
from tests.python.doctor.small import made
from tests.python.peers import random_seed

Figures = tuple[int, int, int]


def figures(machine: Machine, ranks: int, pairs: list[tuple[int, int]]) -> Figures:
    """Of (rank, NIC) pairs: crossings of nodes, how unevenly they lie on owners, distance on PCIe."""
    by_rank = len(machine.nics) >= ranks
    far = [0] * max(len(machine.nics), ranks)
    total = 0
    for rank, nic in pairs:
        far[rank if by_rank else nic] += machine.gpus[rank].numa != machine.nics[nic].numa
        total += on_pcie(machine, rank, nic)
    return sum(far), sum(count * (count - 1) // 2 for count in far), total


def on_pcie(machine: Machine, rank: int, nic: int) -> int:
    """Bridges between a GPU and a NIC, and more through the root: what `distance` says without the nodes."""
    gpu, end = machine.devices[machine.gpus[rank].address], machine.devices[str(machine.nics[nic].address)]
    return 0 if gpu.chain[0] == end.chain[0] else 68


def best(machine: Machine, ranks: int) -> Figures:
    """The least figures of all balanced maps, by trying each."""
    nics = len(machine.nics)
    items, owners = max(nics, ranks), min(nics, ranks)
    found = []
    for chosen in itertools.product(range(owners), repeat=items):
        counts = Counter(chosen)
        if max(counts.values()) - min(counts[owner] for owner in range(owners)) <= 1:
            pairs = [(owner, item) if nics >= ranks else (item, owner) for item, owner in enumerate(chosen)]
            found.append(figures(machine, ranks, pairs))
    return min(found)


def test_the_map_is_the_best_of_all() -> None:
    draw = random.Random(random_seed())
    for _ in range(40):
        ranks, nics = draw.choice([(1, 3), (2, 5), (2, 6), (3, 3), (3, 5), (4, 2), (4, 4), (4, 5), (5, 3)])
        machine = made(
            [(draw.randrange(2), draw.randrange(3)) for _ in range(ranks)],
            [(draw.randrange(2), draw.randrange(3)) for _ in range(nics)],
        )
        names = [nic.name for nic in machine.nics]
        given = nics_for_ranks(machine, ranks)
        pairs = [(rank, names.index(name)) for rank, mine in enumerate(given) for name in mine]
        assert figures(machine, ranks, pairs) == best(machine, ranks), (machine.gpus, machine.nics, given)
        taken = Counter(name for mine in given for name in mine)
        assert set(taken) == set(names)
        assert max(taken.values()) == -(-max(ranks, nics) // nics), given
        assert all(given)


def test_nearest_is_first_and_each_rank_finds_the_same() -> None:
    machine = made([(0, 0), (1, 1)], [(0, 1), (0, 0), (1, 0), (1, 1)])
    assert nics_for_ranks(machine, 2) == [["nic1", "nic0"], ["nic3", "nic2"]]
    turned = made([(0, 0), (1, 1)], [(0, 1), (0, 0), (1, 0), (1, 1)])
    assert nics_for_ranks(turned, 2) == nics_for_ranks(machine, 2)


def test_crossings_that_must_be_are_shared() -> None:
    machine = made([(0, 0), (0, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert [[name for name in mine if name in ("nic2", "nic3")] for mine in nics_for_ranks(machine, 2)] in (
        [["nic2"], ["nic3"]],
        [["nic3"], ["nic2"]],
    )


def test_ranks_can_name_their_gpus() -> None:
    machine = made([(0, 0), (1, 1)], [(0, 0), (1, 1)])
    gpus = [gpu.address for gpu in machine.gpus]
    assert nics_for_ranks(machine, 2, gpus=gpus[::-1]) == [["nic1"], ["nic0"]]
    with pytest.raises(ValueError, match="not one GPU of this machine for each of 2 ranks"):
        nics_for_ranks(machine, 2, gpus=["0000:99:00.0", gpus[0]])


def test_an_explicit_map_wins() -> None:
    machine = made([(0, 0), (1, 1)], [(0, 0), (1, 1)])
    assert nics_for_ranks(machine, 2, [["nic1"], []]) == [["nic1"], []]
    with pytest.raises(ValueError, match="the map has 1 ranks, and the host 2"):
        nics_for_ranks(machine, 2, [["nic1"]])


def test_no_nics_and_no_ranks() -> None:
    machine = made([(0, 0)], [])
    assert nics_for_ranks(machine, 3) == [[], [], []]
    with pytest.raises(ValueError, match="at least one rank"):
        nics_for_ranks(machine, 0)


def test_32_nics_of_8_ranks_are_quick_to_share() -> None:
    places = [(switch // 4, switch % 4) for switch in range(8)]
    machine = made(places, [place for place in places for _ in range(4)])
    assert [{*names} for names in nics_for_ranks(machine, 8)] == [
        {f"nic{4 * rank + each}" for each in range(4)} for rank in range(8)
    ]
