"""The table of a run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.vllm.params.trial import Row

HEAD = f"{'mutation':<86} HTTP  recomputed  tokens  poisoned  refused as"


def line(row: Row) -> str:
    """One mutation."""
    name = f"{row.mutation.family}: {row.mutation.name}"
    recomputed = "-" if row.recomputed is None else str(row.recomputed)
    text = f"{name[:86]:<86} {row.status:>4}  {recomputed:>10}  {row.tokens:<6}  "
    text += f"{'POISONED' if row.poisoned else 'no':<8}  {', '.join(row.names) or '-'}"
    rest = [what for what in row.wrong if what not in ("wrong tokens", "poisoned")]
    return text + (f"   <- {'; '.join(rest)}" if rest else "")


def summary(rows: Sequence[Row]) -> list[str]:
    """By family, and what was refused as what."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row.mutation.family].append(row)
    lines = [
        f"{'family':<16} {'tried':>5} {'loaded':>6} {'wrong':>5} {'poisoned':>8} {'other':>5}  refused as"
    ]
    for family, members in [*families.items(), ("all", list(rows))]:
        names = Counter(name for row in members for name in row.names)
        lines.append(
            f"{family:<16} {len(members):>5} {sum(_loaded(row) for row in members):>6} "
            f"{sum(row.tokens == 'WRONG' for row in members):>5} {sum(row.poisoned for row in members):>8} "
            f"{sum(bool(set(row.wrong) - {'wrong tokens', 'poisoned'}) for row in members):>5}  "
            + ", ".join(f"{name} {count}" for name, count in names.most_common())
        )
    return lines


def _loaded(row: Row) -> bool:
    return row.status == 200 and row.recomputed == 0 and not row.names
