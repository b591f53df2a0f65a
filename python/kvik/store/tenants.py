"""What a tenant of a store may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """A tenant that has more, or less, than to share with all others."""

    name: str
    """1 to 128 bytes."""
    quota: int | str | None = None
    """Bytes of memory that its blocks take at most, or text such as "2GiB": they make room for each other
    only. None: they share what others leave."""
    apart: bool = False
    """Its blocks lie in regions of their own: a client that may read another tenant's blocks over a NIC has
    no key to them."""

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """What ``NAME``, ``NAME=quota:SIZE``, ``NAME=apart`` or ``NAME=quota:SIZE,apart`` says.

        Raises ValueError. Whether SIZE is one is found out by who uses it.
        """
        name, given, rest = text.partition("=")
        quota, apart = None, False
        for word in rest.split(",") if given else ():
            what, colon, value = word.strip().partition(":")
            if what == "quota" and value and quota is None:
                quota = value
            elif what == "apart" and not colon and not apart:
                apart = True
            else:
                raise ValueError(f"{word!r} is nothing that a tenant has: write NAME=quota:SIZE,apart")
        if not name.strip():
            raise ValueError(f"{text!r} names no tenant: write NAME=quota:SIZE,apart")
        return cls(name.strip(), quota, apart)
