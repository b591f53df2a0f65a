"""The memory that can be had here."""

from kvik.bench import facts
from kvik.demo.scene import SettingError
from kvik.demo.words import size


def check_memory(needed: int, what: str, instead: str) -> None:
    """`SettingError` unless `needed` bytes are free; `what` wants them, and `instead` wants less."""
    have = facts.memory_available()
    if have is not None and have < needed:
        raise SettingError(
            f"not enough memory: {what} want {size(needed)}, and {size(have)} are free; try {instead}"
        )
