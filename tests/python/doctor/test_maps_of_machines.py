"""NICs of 1, 2, 4 and 8 ranks on each recorded machine: no map is better.

Where there are few maps, all are tried. Of the others it is shown that each NIC (or each rank, where there
are fewer NICs) has the least that any rank could give it, and crossings are even: nothing can be below that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest

from kvik.doctor.maps import distance, nics_for_ranks, usable
from kvik.doctor.model import Machine
from tests.python.doctor.machines import MACHINES, recorded
from tests.python.doctor.small import examined

Figures = tuple[int, int, int]
_TRIED = 50_000  # maps


class Cells:
    """What each owner costs an item: NICs are items while they are not fewer than the ranks."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        self.nics = sorted(usable(machine), key=lambda nic: nic.name)
        gpus = [*machine.gpus[:ranks], *[None] * (ranks - len(machine.gpus))]
        self.by_nic = len(self.nics) >= ranks
        cells = [[self._cell(machine, gpu, nic) for nic in self.nics] for gpu in gpus]
        self.cells = [list(column) for column in zip(*cells, strict=True)] if self.by_nic else cells
        self.ranks = ranks
        self.owners = len(self.cells[0])

    @staticmethod
    def _cell(machine: Machine, gpu: object, nic: object) -> tuple[int, int]:
        far = getattr(gpu, "numa", None), getattr(nic, "numa", None)
        return int(None not in far and far[0] != far[1]), distance(machine, gpu, nic) % (1 << 32)  # type: ignore[arg-type]

    def figures(self, owners: list[int]) -> Figures:
        """Crossings, how unevenly owners have them, distance on PCIe."""
        far, total = [0] * self.owners, 0
        for item, owner in enumerate(owners):
            crosses, hops = self.cells[item][owner]
            far[owner] += crosses
            total += hops
        return sum(far), sum(count * (count - 1) // 2 for count in far), total

    def bound(self) -> Figures:
        """No map is below it."""
        least = [min(row) for row in self.cells]
        far = sum(crosses for crosses, _ in least)
        each, more = divmod(far, self.owners)
        counts = [each + 1] * more + [each] * (self.owners - more)
        return far, sum(count * (count - 1) // 2 for count in counts), sum(hops for _, hops in least)

    def every(self) -> Iterator[list[int]]:
        """All maps whose shares differ by at most one."""
        items = len(self.cells)
        most = -(-items // self.owners)
        left = [most] * self.owners
        may = items % self.owners or self.owners  # owners that may have `most`

        def go(chosen: list[int], full: int) -> Iterator[list[int]]:
            if len(chosen) == items:
                yield chosen
                return
            for owner in range(self.owners):
                now = full + (left[owner] == 1)
                if left[owner] and now <= may:
                    left[owner] -= 1
                    yield from go([*chosen, owner], now)
                    left[owner] += 1

        return go([], 0)

    def count(self) -> int:
        """How many maps there are, with shares that differ by at most one."""
        items = len(self.cells)
        least, more = divmod(items, self.owners)
        alike: int = math.factorial(least) ** (self.owners - more) * math.factorial(least + 1) ** more
        return math.factorial(items) // alike * math.comb(self.owners, more)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MACHINES)
def test_no_map_of_a_recorded_machine_is_better(name: str, ranks: int) -> None:
    machine = examined(recorded(name))
    cells = Cells(machine, ranks)
    names = [nic.name for nic in cells.nics]
    given = nics_for_ranks(machine, ranks)
    taken = Counter(one for mine in given for one in mine)
    assert set(taken) == set(names)
    assert max(map(len, given)) - min(map(len, given)) <= 1
    assert max(taken.values()) - min(taken.values()) <= 1
    by_name = {one: rank for rank, mine in enumerate(given) for one in mine}
    owners = [by_name[one] for one in names] if cells.by_nic else [names.index(mine[0]) for mine in given]
    figures = cells.figures(owners)
    if cells.count() <= _TRIED:
        tried = [cells.figures(one) for one in cells.every()]
        assert len(tried) == cells.count()
        assert figures == min(tried)
    else:
        assert figures == cells.bound()


def test_the_bound_is_below_every_map() -> None:
    """Of those machines whose maps can all be tried."""
    for name, ranks in (("two-sockets-8x8", 2), ("p4d.24xlarge", 8), ("p4d.24xlarge", 4)):
        cells = Cells(examined(recorded(name)), ranks)
        assert cells.bound() <= min(cells.figures(one) for one in cells.every())
