"""`run.load` of the driver `storage`: which file is loaded, how often, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvik_lab.records.schema import Count, Positive, Section, Text

REQUEST = 16 << 20


class FileLoad(Section):
    """Loads of one file into memory that is there already, each with nothing of it in the page cache."""

    path: Text = Field(description="Below what is mounted for the run, or from the root where nothing is.")
    bytes: Positive = Field(description="That the file has: it is held to it.")
    loads: Positive = Field(default=3, description="That are measured.")
    warmup: Count = Field(default=1, description="Loads before them.")
    by: Literal["read", "mmap"] = Field(
        default="read", description="mmap: copied from a mapping, as safetensors does unless told otherwise."
    )
    request: Annotated[int, Field(ge=4096)] = Field(default=REQUEST, description="Bytes of one read.")
