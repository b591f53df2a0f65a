"""Instances of clouds: what NICs and GPUs they have, to be compared with what is found.

Rates are those of the vendor, in Gbit/s (10^9 bits a second) each way. Nothing here was measured by kvik.
"""

from __future__ import annotations

from dataclasses import dataclass

_MULTI = "EC2 User Guide, Maximize network bandwidth on instances with multiple network cards"
_BATCH = "AWS Batch User Guide, GPU jobs: table of instance types"
_TOPOLOGY = "aws/aws-ofi-nccl, topology/p4d-24xl-topo.xml"
_MOONCAKE = "Mooncake documentation, AWS EFA Transport: benchmark results"


@dataclass(frozen=True)
class Instance:
    """A type of instance. `rate_gbits` is of one NIC; `source` is where counts and rate are from."""

    name: str
    gpus: int
    gpu: str
    nics: int
    rate_gbits: int
    source: str

    @property
    def total_gbs(self) -> float:
        """GB/s (10^9 bytes) each way of all NICs: the bound that no rate of `kvik selftest` can pass."""
        return self.nics * self.rate_gbits / 8

    @property
    def nics_for_gpu(self) -> float:
        """NICs a GPU; below 1, GPUs share one."""
        return self.nics / self.gpus


INSTANCES = (
    Instance("g5.12xlarge", 4, "A10G", 1, 40, _BATCH),
    Instance("p4d.24xlarge", 8, "A100 40 GB", 4, 100, _TOPOLOGY),
    Instance("p5.48xlarge", 8, "H100", 32, 100, _MULTI),
    Instance("p5e.48xlarge", 8, "H200", 32, 100, _MULTI),
    Instance("p5en.48xlarge", 8, "H200", 16, 200, _MOONCAKE),
    Instance("p6-b200.48xlarge", 8, "B200", 8, 400, _MOONCAKE),
    Instance("p6-b300.48xlarge", 8, "B300", 16, 400, _MOONCAKE),
)
_BY_NAME = {instance.name: instance for instance in INSTANCES}


def instance_of(board: str) -> Instance | None:
    """The instance that a machine says it is: a word of its DMI names."""
    return next((_BY_NAME[word] for word in board.split() if word in _BY_NAME), None)


def differences(instance: Instance, nics: int, rates_gbits: tuple[float, ...], gpus: int) -> list[str]:
    """How a machine differs from its type, a sentence each. `rates_gbits` has the rate of each NIC.

    NICs are attached when an instance is launched, so fewer than the type has are a setting and no defect.
    """
    found = []
    if gpus != instance.gpus:
        found.append(f"{gpus} GPUs are seen, and {instance.name} has {instance.gpus}")
    if nics != instance.nics:
        found.append(
            f"{nics} EFA devices are seen, and {instance.name} can have {instance.nics}: "
            "each network card takes an interface of its own when the instance is launched"
        )
    slow = [rate for rate in rates_gbits if rate < instance.rate_gbits]
    if slow:
        found.append(
            f"{len(slow)} EFA devices say {min(slow):g} Gbit/s, "
            f"and those of {instance.name} have {instance.rate_gbits}"
        )
    return found


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """The table in `docs/efa.md`: name, GPUs, NICs, GB/s of all NICs, NICs a GPU, source."""
    return [
        (
            f"`{one.name}`",
            f"{one.gpus} x {one.gpu}",
            f"{one.nics} x {one.rate_gbits} Gbit/s",
            f"{one.total_gbs:g}",
            f"{one.nics_for_gpu:g}",
            one.source,
        )
        for one in INSTANCES
    ]
