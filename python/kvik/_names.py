"""The words that options take, for annotations of code that passes them on."""

from typing import Literal, TypeAlias

TransportName: TypeAlias = Literal["auto", "tcp", "local", "nics"]
VerifyName: TypeAlias = Literal["auto", "off", "sample", "full"]
TrafficClassName: TypeAlias = Literal["handover", "bulk"]
RightName: TypeAlias = Literal["read", "write"]
