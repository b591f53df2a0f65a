"""What is run: the study file's `run`, with every level of a row put in.

In the file any value may be a text with the name of a factor or a constant in brackets: `"{tokens}"`
alone is the level itself, `"tokens={tokens}"` a text with it. `sets` of a factor's level puts further
values in, by their path.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvik_lab.records.schema import Seconds, Section, Share, Text

DriverName = Literal["emulator", "storage", "transfers", "vllm"]
ConnectorName = Literal["kvik", "nixl"]
Mode = Literal["disaggregated", "unified"]
Kind = Literal["prefill", "decode", "unified", "router", "store", "target", "load"]
Value = Annotated[str | int | float | bool | list[str | int | float], Field(union_mode="left_to_right")]
EnvValue = str | int | float
_AMOUNT = re.compile(r"[^=]+=\d+(\.\d+)?")


class NodeSpec(Section):
    """A host on which roles run."""

    executor: Literal["local", "ssh", "slurm", "ray"] = "local"
    host: Text | None = Field(
        None,
        description="For ssh: HOST or USER@HOST, as ssh takes it; for Ray HOST:PORT of its head, or auto.",
    )
    address: Text | None = Field(
        None, description="Under which other nodes reach its servers; by default loopback, ssh's host, "
        "or what the cluster says."
    )  # fmt: skip
    python: Text | None = Field(None, description="The Python there that has kvik; by default this one.")
    folder: Text | None = Field(None, description="Where its processes work; by default a temporary one.")
    options: list[Text] = Field(
        [],
        description="More options: for ssh, such as -p2222; for salloc, such as --gpus=1; for Ray "
        "what is asked for, such as GPU=1.",
    )
    wait: Seconds = Field(600.0, description="Seconds until Slurm or Ray has to have given it.")

    @model_validator(mode="after")
    def _fits(self) -> NodeSpec:
        if self.executor != "ray" and (self.executor == "ssh") != (self.host is not None):
            raise PydanticCustomError(
                "study", "`executor: ssh` and `host: user@address` go together",
                {"remedy": "write both, or neither; Slurm is asked for a host by options: [--nodelist=HOST]"},
            )  # fmt: skip
        wrong = [one for one in self.options if self.executor == "ray" and not _AMOUNT.fullmatch(one)]
        if wrong:
            raise PydanticCustomError(
                "study", "{option}: no resource of Ray's and its amount",
                {"option": wrong[0], "remedy": "write such as CPU=8, GPU=1 or node:192.0.2.21=0.01"},
            )  # fmt: skip
        return self


class LinkSpec(Section):
    """The cable between the hosts of prefill and of everything else: two network namespaces of this
    machine."""

    rate: Text = Field(description="What passes each way, such as 500mbit or 10gbit.")
    delay: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Seconds more, each way.")


class StorageSpec(Section):
    """What the driver `storage` mounts for each run, in a mount namespace of the run's own; takes root."""

    type: Text = Field("none", description="nfs4, ext4, ...; none: nothing is mounted.")
    source: str = Field("", description="As mount(8) takes it, such as 192.0.2.20:/models.")
    options: str = Field("", description="With addr=... among them NFS is mounted without mount.nfs.")


class RoleSpec(Section):
    """One kind of process."""

    count: Annotated[int, Field(ge=0, le=256)] = 1
    node: Text | None = Field(None, description="A name in `nodes`; several are dealt out to a list of them.")
    options: dict[Text, Value] = Field({}, description="Flags: {kv_memory: 1GiB} is --kv-memory 1GiB.")
    env: dict[Text, EnvValue] = Field({})
    nodes: list[Text] | None = Field(
        None, description="Instead of `node`: the first of the kind runs on the first."
    )


class EnginesSpec(Section):
    """What every engine has, whatever its role; what its own role says goes before it."""

    node: Text | None = None
    options: dict[Text, Value] = Field({})
    env: dict[Text, EnvValue] = Field({})


ENGINES: tuple[Kind, ...] = ("prefill", "decode", "unified")
TRANSFER: tuple[Kind, ...] = ("target", "load")
"""The engines of the driver `transfers`."""


class StatedSpec(Section):
    """What gates hold a run to, beside what follows from the rest of `run`."""

    prefix_hit_share: Share = Field(0.0, description="Prompt tokens that are to be found in a prefix cache.")
    store_hit_share: Share = Field(0.0, description="Prompt tokens that are to come from a store.")
    ttft_floor: Seconds | None = Field(None, description="No first token can come sooner.")
    unified_ttft: Seconds | None = Field(
        None, description="Lower end of the interval of one engine's time to first token, likewise."
    )


class RunSpec(Section):
    """What is started for a run, and what load it gets."""

    driver: DriverName
    mode: Mode = "disaggregated"
    transport: Text = Field(
        "tcp",
        description="What moves KV between prefill and decode, or pages between load and target: of kvik's "
        "engines tcp, local, nics or auto; "
        "of storage: tcp, rdma or local.",
    )
    connector: ConnectorName = Field("kvik", description="Of vLLM: kvik's, or vLLM's own over NIXL.")
    nodes: dict[Text, NodeSpec] = Field({})
    link: LinkSpec | None = None
    storage: StorageSpec = Field(default_factory=lambda: StorageSpec.model_validate({}))
    engines: EnginesSpec = Field(default_factory=lambda: EnginesSpec.model_validate({}))
    roles: dict[Kind, RoleSpec] = Field({})
    load: dict[Text, Any] = Field({}, description="Of the load driver: see `kvik lab load --help`.")
    stated: StatedSpec = Field(default_factory=lambda: StatedSpec.model_validate({}))
    ready_limit: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds that a server may take until it is ready; by default the driver's."
    )
    limit: Annotated[float, Field(gt=0)] = Field(600.0, description="Seconds that a run may take.")

    def role(self, kind: Kind) -> RoleSpec:
        """What is said of a kind of role, with what is said of all engines."""
        own = self.roles.get(kind) or RoleSpec.model_validate({})
        if kind not in (TRANSFER if self.driver == "transfers" else ENGINES):
            return own
        every = self.engines
        more = {"options": {**every.options, **own.options}, "env": {**every.env, **own.env}}
        node = own.node if own.nodes else own.node or every.node
        return own.model_copy(update={**more, "node": node})
