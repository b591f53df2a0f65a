"""`run.load` of the driver `transfers`: what is moved, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvik_lab.records.schema import Count, Positive, Section

MIN_PAGE = 512  # of `kvik bench transfer`


class TransferLoad(Section):
    """Transfers of so many pages each, one after the other."""

    op: Literal["read", "write"] = Field(
        default="read", description="Whether the initiator reads the target's pages, or writes them."
    )
    page_bytes: Annotated[int, Field(ge=MIN_PAGE, multiple_of=8)]
    pages: Positive = Field(description="Of one transfer, scattered over the memory of either side.")
    traffic_class: Literal["handover", "bulk"] = Field(default="handover", alias="class")
    repetitions: Positive = Field(default=30, description="That are measured, each a value.")
    warmup: Count = Field(default=3, description="Transfers before them.")

    @property
    def bytes(self) -> int:
        """Of one transfer."""
        return self.page_bytes * self.pages
