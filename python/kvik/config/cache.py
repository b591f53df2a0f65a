"""The options of the store of a serving engine: a section of their own, since few who hand KV over keep
it."""

from __future__ import annotations

from functools import partial

from kvik.config.kinds import Rate, Seconds, Size, Text, Whole
from kvik.config.schema import Entry, Option

_cache = partial(Option, section="cache")

CACHE = Entry(
    name="cache",
    title="The store of a serving engine",
    where="a key of the object `store` in `kv_connector_extra_config`",
    options=(
        _cache(
            name="address",
            kind=Text(),
            default=None,
            unset="no server",
            help="HOST:PORT of a `kvik store serve`, which engines share and which outlives them. Of "
            "several: with commas between them, file:PATH, dns:NAME:PORT, or etcd:http://HOST:PORT/PREFIX.",
            reason="Without it and without host_cache nothing is kept.",
        ),
        _cache(
            name="copies",
            kind=Whole(1, 16),
            default=1,
            help="Of several servers, how many keep each block.",
            reason="Each further one costs its memory and the time of a put, and answers while another is "
            "away.",
        ),
        _cache(
            name="host_cache",
            kind=Size(1 << 20),
            default=None,
            unset="no memory",
            help="Bytes of each rank's process that hold blocks, before a server is asked.",
            reason="What was evicted from the engine's KV blocks comes back without a network. It is memory "
            "beside the engine's own.",
        ),
        _cache(
            name="deadline",
            kind=Seconds(),
            default=1.0,
            help="How long a request may wait for the store; then it is computed.",
            reason="It bounds what a store that has stopped can cost a request.",
        ),
        _cache(
            name="save_deadline",
            kind=Seconds(),
            default=10.0,
            help="How long KV blocks may be held for a save; then it is given up.",
            reason="Nobody waits for a save, but its blocks are the engine's only after it.",
        ),
        _cache(
            name="prefill_rate",
            kind=Rate(("measured", "off")),
            default="measured",
            help="Tokens of prompts that this server computes in a second: what a server has is computed "
            "where fetching it would take longer. measured: by the server's own steps. off: it is always "
            "fetched.",
            reason="Over a slow link fetching can take longer than computing; on most links it does not.",
        ),
        _cache(
            name="tenant",
            kind=Text(),
            default="default",
            help="Whose blocks they are, for a server's quotas and figures.",
            reason="It sets nobody apart: for that there is `cache_salt`.",
        ),
        _cache(
            name="weights",
            kind=Text(),
            default=None,
            unset="a digest of their files",
            help="What stands for the weights, instead of the bytes of their files.",
            reason="For weights that are not in files, and for such as take long to read. Who replaces "
            "them must change it.",
        ),
    ),
)
