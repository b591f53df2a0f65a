"""The options of the object store below a `kvik store`: a set of their own, since few have one."""

from __future__ import annotations

from functools import partial

from kvik.config.kinds import Size, Text
from kvik.config.schema import Entry, Option

_store = partial(Option, section="store")

OBJECT = Entry(
    name="object",
    title="The object store below a kvik store",
    where="a flag of `kvik store serve`",
    options=(
        _store(
            name="object",
            kind=Text(what="an address such as s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER,"),
            default=None,
            help="An object store where blocks are kept that memory and the log have no room for.",
            reason="It has room for what disks do not, and outlives the machine. Each server needs a prefix "
            "of its own; credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*).",
        ),
        _store(
            name="object_size",
            kind=Size(256 << 10),
            default=1 << 40,
            help="Bytes that its objects may take.",
            reason="Beyond it the oldest objects go. What a bucket costs is by the bytes in it.",
        ),
        _store(
            name="object_batch",
            kind=Size(64 << 10),
            default=32 << 20,
            help="Bytes of an object: blocks are gathered until there are so many, or for ten seconds.",
            reason="Object stores charge by the request, and like 8 to 64 MiB. Up to four times as much is "
            "in memory, and lost when the server is killed.",
        ),
    ),
)
