"""`run.load` of the driver `transfers`: what is moved, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MIN_PAGE = 512  # of `kvik bench transfer`
Positive = Annotated[int, Field(ge=1)]


class TransferLoad(BaseModel):
    """Transfers of so many pages each, one after the other."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    op: Literal["read", "write"] = Field(
        default="read", description="Whether the initiator reads the target's pages, or writes them."
    )
    page_bytes: Annotated[int, Field(ge=MIN_PAGE, multiple_of=8)]
    pages: Positive = Field(description="Of one transfer, scattered over the memory of either side.")
    traffic_class: Literal["handover", "bulk"] = Field(default="handover", alias="class")
    repetitions: Positive = Field(default=30, description="That are measured, each a value.")
    warmup: Annotated[int, Field(ge=0)] = Field(default=3, description="Transfers before them.")

    @property
    def bytes(self) -> int:
        """Of one transfer."""
        return self.page_bytes * self.pages
