"""Which NICs each rank takes. Every rank computes the whole map by itself from the same machine, so all
agree."""

from __future__ import annotations

from collections.abc import Sequence

from kvik.doctor.model import Gpu, Machine, Nic

_FAR = 1 << 32  # More than all of the rest together: a crossing is taken only where it cannot be avoided.
_NEVER = 1 << 62
_EVEN = 1 << 12  # More than any PCIe distance.


def nics_for_ranks(
    machine: Machine,
    ranks: int,
    explicit: Sequence[Sequence[str]] | None = None,
    gpus: Sequence[str] | None = None,
) -> list[list[str]]:
    """The NICs of each of `ranks` ranks of one host, nearest first; rank `i` has the GPU at `gpus[i]`, by
    default the `i`-th by PCI address.

    Each NIC that has a link goes to one rank while there are at least as many NICs as ranks, and shares
    differ by at most one; with fewer NICs than ranks, each rank has one and shares differ by at most one as
    well. Among those maps it is one with the fewest crossings of NUMA nodes, these spread evenly over ranks,
    then with the least distance on PCIe. An `explicit` map is returned as it is; `ValueError` where a list
    has another length than `ranks`, where a GPU is not of the machine, or `ranks` is not positive. No NICs:
    empty lists."""
    if ranks < 1:
        raise ValueError(f"a host has at least one rank, not {ranks}")
    if explicit is not None:
        if len(explicit) != ranks:
            raise ValueError(f"the map has {len(explicit)} ranks, and the host {ranks}")
        return [list(names) for names in explicit]
    nics = sorted(usable(machine), key=lambda nic: nic.name)
    if not nics:
        return [[] for _ in range(ranks)]
    costs = [[distance(machine, gpu, nic) for nic in nics] for gpu in _gpus(machine.gpus, ranks, gpus)]
    if len(nics) >= ranks:
        owners = _shared_out([list(column) for column in zip(*costs, strict=True)], ranks)
    else:
        owners = _shared_out(costs, len(nics))
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for index, other in enumerate(owners):
        rank, nic = (other, index) if len(nics) >= ranks else (index, other)
        taken[rank].append(nic)
    return [
        [nics[nic].name for nic in sorted(mine, key=lambda nic: (costs[rank][nic], nic))]
        for rank, mine in enumerate(taken)
    ]


def _gpus(here: Sequence[Gpu], ranks: int, asked: Sequence[str] | None) -> list[Gpu | None]:
    if asked is None:
        return [*here[:ranks], *[None] * (ranks - len(here))]
    known = {gpu.address: gpu for gpu in here}
    if len(asked) != ranks or not known.keys() >= set(asked):
        raise ValueError(f"{', '.join(asked)}: not one GPU of this machine for each of {ranks} ranks")
    return [known[address] for address in asked]


def usable(machine: Machine) -> list[Nic]:
    """NICs with a port that has a link."""
    return [nic for nic in machine.nics if any(port.active for port in nic.ports)]


def distance(machine: Machine, gpu: Gpu | None, nic: Nic) -> int:
    """How far a NIC is from a GPU: bridges between them; through the root complex more, through the chipset
    more, across NUMA nodes far more than all of that."""
    if gpu is None or nic.address is None:
        return 0
    a, b = machine.devices[gpu.address], machine.devices[nic.address]
    crosses = a.numa is not None and b.numa is not None and a.numa != b.numa
    common = next((bridge for bridge in a.chain if bridge in b.chain), None)
    if common is not None:
        hops = a.chain.index(common) + b.chain.index(common)
    else:
        hops = 64 + len(a.chain) + len(b.chain) + 16 * (a.chipset + b.chipset)
    return hops + _FAR * crosses


def _shared_out(costs: list[list[int]], owners: int) -> list[int]:
    """The owner of each item, so that owners' counts differ by at most one and the sum of costs is least.

    `costs[item][owner]`. An assignment over places: each owner has `items // owners` that must be filled and
    one that may be, if a remainder is left (Hungarian method, O(items * places^2)). An owner's second
    crossing costs a little more than its first, so crossings spread."""
    items = len(costs)
    least, rest = divmod(items, owners)
    places = [owner for owner in range(owners) for _ in range(least)]
    if rest:
        places += list(range(owners))
    # A place that must be filled goes before one that may be: leaving it empty costs more than any map.
    must = sum(max(row) + _EVEN * items for row in costs) + 1
    number = [places[:at].count(owner) for at, owner in enumerate(places)]
    table = [
        [
            row[owner]
            + (_EVEN * number[at] if row[owner] >= _FAR else 0)
            + (must if at >= least * owners else 0)
            for at, owner in enumerate(places)
        ]
        for row in costs
    ]
    return [places[at] for at in _assignment(table)]


def _assignment(costs: list[list[int]]) -> list[int]:
    """The column of each row, all different, with the least sum; rows are not more than columns.

    Successive shortest paths with potentials (Jonker and Volgenant, 1987); index 0 stands for "none".
    """
    columns = len(costs[0])
    up, down, row_of = [0] * (len(costs) + 1), [0] * (columns + 1), [0] * (columns + 1)
    for row in range(1, len(costs) + 1):
        row_of[0] = row
        column, way = _shortest(costs, up, down, row_of)
        while column:
            row_of[column] = row_of[way[column]]
            column = way[column]
    found = [0] * len(costs)
    for column in range(1, columns + 1):
        if row_of[column]:
            found[row_of[column] - 1] = column - 1
    return found


def _shortest(
    costs: list[list[int]], up: list[int], down: list[int], row_of: list[int]
) -> tuple[int, list[int]]:
    """The free column that is nearest to the row of column 0, and the column before each on the way there;
    the potentials `up` (rows) and `down` (columns) are brought up to date."""
    columns = len(down) - 1
    best, way, seen = [_NEVER] * (columns + 1), [0] * (columns + 1), {0}
    column = 0
    while row_of[column]:
        row = row_of[column]
        for other in set(range(1, columns + 1)) - seen:
            reduced = costs[row - 1][other - 1] - up[row] - down[other]
            if reduced < best[other]:
                best[other], way[other] = reduced, column
        nearest = min(set(range(1, columns + 1)) - seen, key=lambda other: (best[other], other))
        step = best[nearest]
        for other in range(columns + 1):
            if other in seen:
                up[row_of[other]] += step
                down[other] -= step
            else:
                best[other] -= step
        seen.add(nearest)
        column = nearest
    return column, way
