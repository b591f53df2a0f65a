"""`run.load` of the driver `storage`: which file is loaded, how often, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

REQUEST = 16 << 20


class FileLoad(BaseModel):
    """Loads of one file into memory that is there already, each with nothing of it in the page cache."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: Annotated[str, Field(min_length=1)] = Field(
        description="Below what is mounted for the run, or from the root where nothing is."
    )
    bytes: Annotated[int, Field(ge=1)] = Field(description="That the file has: it is held to it.")
    loads: Annotated[int, Field(ge=1)] = Field(default=3, description="That are measured.")
    warmup: Annotated[int, Field(ge=0)] = Field(default=1, description="Loads before them.")
    by: Literal["read", "mmap"] = Field(
        default="read", description="mmap: copied from a mapping, as safetensors does unless told otherwise."
    )
    request: Annotated[int, Field(ge=4096)] = Field(default=REQUEST, description="Bytes of one read.")
