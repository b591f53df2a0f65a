"""The words that options take, for annotations of code that passes them on."""

from typing import Literal, TypeAlias

TransportName: TypeAlias = Literal["auto", "tcp", "local", "nics"]
VerifyName: TypeAlias = Literal["auto", "off", "sample", "full"]
RightName: TypeAlias = Literal["read", "write"]
