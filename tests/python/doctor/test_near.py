"""NICs near a rank: on recorded machines, on small ones beside the plain map, and what cannot be told."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvik.doctor.maps import nics_for_ranks
from kvik.doctor.model import Machine, Missing, Nic, Port
from kvik.doctor.near import EFA, VERBS, Near, NearNics, NearUnknownError, near_gpus
from kvik.doctor.show import machine_lines, to_json
from tests.python.doctor.machines import recorded
from tests.python.doctor.machines.recording import Machine as Described
from tests.python.doctor.machines.recording import record
from tests.python.doctor.machines.servers import HEALTHY, two_sockets
from tests.python.doctor.small import examined, made
from tests.python.peers import random_seed

SERVERS = {machine.name: machine for machine in HEALTHY}


def near_gpu(machine: Machine, kind: str, address: str) -> Near:
    return NearNics(machine, kind).of_gpu(address)


def near_number(machine: Machine, kind: str, number: int, ranks: int) -> Near:
    return NearNics(machine, kind).of_rank(number, ranks)


def able(machine: Machine) -> Machine:
    """The same, with a device file of each NIC."""
    return replace(machine, nics=tuple(replace(nic, node="/dev/infiniband/uverbs0") for nic in machine.nics))


def changed(machine: Machine, number: int, **fields: Any) -> Machine:
    """The same with another NIC in the place of one."""
    nics = list(machine.nics)
    nics[number] = replace(nics[number], **fields)
    return replace(machine, nics=tuple(nics))


def names(machine: Machine) -> list[str]:
    return [nic.name for nic in machine.nics]


@pytest.mark.parametrize("name", SERVERS)
def test_each_gpu_of_a_server_has_its_own(name: str) -> None:
    machine = examined(recorded(name))
    kind = VERBS if name.startswith("two") else EFA
    ports = [nic for nic in machine.nics if nic.ports]
    found = {gpu.address: near_gpu(machine, kind, gpu.address) for gpu in machine.gpus}
    if name.startswith("g5"):  # one NIC, and a machine of one node
        assert {near.devices for near in found.values()} == {()}
        assert {near.node for near in found.values()} == {None}
        return
    by_name = {nic.name: nic for nic in ports}
    for gpu, near in found.items():
        assert len(near.devices) == max(1, len(ports) // len(machine.gpus))
        for device in near.devices:
            # Under the switch that the GPU is under: the bridge above both of their own ports.
            nic = machine.devices[str(by_name[device].address)]
            assert nic.chain[1] == machine.devices[gpu].chain[1], (gpu, device)
        assert near.node == machine.devices[gpu].numa
        assert f"near GPU {gpu} of {len(machine.gpus)} alike" in near.why
    taken = [device for near in found.values() for device in near.devices]
    assert sorted(set(taken)) == sorted(by_name)
    assert len(taken) == max(len(ports), len(machine.gpus))


def test_it_is_the_map_of_the_whole_host() -> None:
    """However many GPUs and NICs there are and wherever they are: beside GPUs of another model, and for
    whichever rank asks."""
    draw = random.Random(random_seed())
    for _ in range(40):
        places = [(draw.randrange(2), draw.randrange(3)) for _ in range(draw.randrange(1, 6))]
        nics = [(draw.randrange(2), draw.randrange(3)) for _ in range(draw.randrange(1, 7))]
        machine = able(made(places, nics))
        other = draw.sample(machine.gpus, draw.randrange(len(machine.gpus)))
        devices = dict(machine.devices)
        for gpu in other:
            devices[gpu.address] = replace(devices[gpu.address], device=2)
        machine = replace(machine, devices=devices)
        ours = [gpu.address for gpu in machine.gpus if gpu not in other]
        wanted = nics_for_ranks(machine, len(ours), gpus=ours)
        for address, expected in zip(ours, wanted, strict=True):
            told = near_gpu(machine, VERBS, address).devices or tuple(names(machine))
            assert sorted(told) == sorted(expected), (machine.gpus, machine.nics)
        assert sorted({name for mine in wanted for name in mine}) == sorted(names(machine))


def test_ranks_in_host_memory_share_by_their_number() -> None:
    for count in (1, 2, 3, 4, 5):
        machine = able(made([(0, 0), (1, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)]))
        found = [near_number(machine, VERBS, number, count) for number in range(count)]
        shares = [near.devices or tuple(names(machine)) for near in found]
        assert sorted({name for share in shares for name in share}) == names(machine)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert len([name for share in shares for name in share]) == max(4, count)
        assert {near.node for near in found} == {None}
        assert found[-1].why == f"the share of rank {count - 1} of {count} on this host"


def test_slower_nics_and_those_in_software_are_left_out() -> None:
    machine = able(made([(0, 0), (1, 1)], [(0, 0), (1, 1), (1, 1), (0, 0)]))
    slow = (Port(1, 25.0, "4: ACTIVE", "InfiniBand", ()),)
    machine = changed(changed(machine, 2, ports=slow), 3, address=None, driver="software", numa=None)
    first, second = (near_gpu(machine, VERBS, gpu.address) for gpu in machine.gpus)
    assert (first.devices, second.devices) == (("nic0",), ("nic1",))
    assert first.why.endswith("; left out as slower or in software: nic2 (25 Gbit/s), nic3 (100 Gbit/s)")
    # Half of the fastest is not slow, and where all are in software they are what there is.
    half = changed(machine, 2, ports=(replace(slow[0], rate_gbits=50.0),))
    assert sorted(near_gpu(half, VERBS, machine.gpus[1].address).devices) == ["nic1", "nic2"]
    only = replace(machine, nics=machine.nics[3:])
    assert near_gpu(only, VERBS, machine.gpus[0].address).devices == ()


def test_only_what_a_transfer_can_use_is_near() -> None:
    down = (Port(1, 100.0, "1: DOWN", "InfiniBand", ()),)
    mute = (Port(1, 100.0, "4: ACTIVE", "Ethernet", ()),)
    for unusable in ({"ports": down}, {"ports": mute}, {"driver": "efa"}):
        machine = changed(able(made([(0, 0)], [(0, 0), (1, 0)])), 0, **unusable)
        assert near_gpu(machine, VERBS, machine.gpus[0].address).devices == (), unusable
        machine = changed(able(made([(0, 0)] * 2, [(0, 0), (0, 0), (1, 0)])), 0, **unusable)
        found = [near_gpu(machine, VERBS, gpu.address).devices for gpu in machine.gpus]
        assert sorted(found) == [("nic1",), ("nic2",)], unusable
    machine = changed(able(made([(0, 0)], [(0, 0)])), 0, driver="efa")
    assert near_gpu(machine, EFA, machine.gpus[0].address).devices == ()


def test_ports_are_named_as_an_engine_names_them() -> None:
    two = tuple(Port(number, 100.0, "4: ACTIVE", "InfiniBand", ()) for number in (1, 2))
    machine = changed(able(made([(0, 0), (1, 1)], [(0, 0), (1, 1)])), 0, ports=two)
    machine = changed(machine, 1, ports=(replace(two[1], rate_gbits=200.0),))
    assert near_gpu(machine, VERBS, machine.gpus[0].address).devices == ("nic0", "nic0/2")
    assert near_gpu(machine, VERBS, machine.gpus[1].address).devices == ("nic1/2",)
    mute = replace(two[1], layer="Ethernet")
    machine = changed(machine, 0, ports=(two[0], mute))
    assert near_gpu(machine, VERBS, machine.gpus[0].address).devices == ("nic0",)


def container(nics: Sequence[int], gpus: Sequence[int]) -> Machine:
    """A container on the server of two sockets that was given some NICs and GPUs. Of the others it sees the
    PCIe tree, and no files."""
    document = record(two_sockets())
    described: Described = two_sockets()
    addresses = [device.address for device in described.those("gpu")]
    for number in range(8):
        if number not in nics:
            del document["files"][f"/dev/infiniband/uverbs{number}"]
        if number not in gpus:
            del document["files"][f"/proc/driver/nvidia/gpus/{addresses[number]}/information"]
    return examined(document)


def test_a_container_shares_what_it_was_given() -> None:
    machine = container(nics=(4, 5), gpus=(6,))
    assert sorted(near_gpu(machine, VERBS, machine.gpus[6].address).devices) == ["mlx5_4", "mlx5_5"]
    machine = container(nics=(0, 1, 2, 3), gpus=(0, 1))
    found = [near_gpu(machine, VERBS, machine.gpus[number].address).devices for number in (0, 1)]
    assert [len(devices) for devices in found] == [2, 2]
    assert [devices[0] for devices in found] == ["mlx5_0", "mlx5_1"]
    # With all NICs, GPUs that it does not have may be another container's, and keep theirs.
    machine = container(nics=range(8), gpus=(3,))
    assert near_gpu(machine, VERBS, machine.gpus[3].address).devices == ("mlx5_3",)


def test_what_cannot_be_told_is_said_by_name() -> None:
    machine = able(made([(0, 0)], [(0, 0)]))
    gpu = machine.gpus[0].address
    no_file: tuple[Nic, ...] = (replace(machine.nics[0], node=None),)
    down = (replace(machine.nics[0], ports=(Port(1, 100.0, "1: DOWN", "InfiniBand", ()),)),)
    rdma = "/sys/class/infiniband"
    for here, kind, address, text in (
        (machine, VERBS, "0000:99:00.0", "GPU 0000:99:00.0 is not among the GPUs of /sys/bus/pci/devices"),
        (replace(machine, nics=(), unread=(Missing(rdma, "absent"),)), VERBS, gpu, f"{rdma}: absent"),
        (replace(machine, nics=()), VERBS, gpu, f"{rdma} has no RDMA NIC with a link"),
        (replace(machine, nics=down), VERBS, gpu, f"{rdma} has no RDMA NIC with a link"),
        (machine, EFA, gpu, f"{rdma} has no EFA with a link"),
        (replace(machine, nics=no_file), VERBS, gpu, "no RDMA NIC has its device file in /dev/infiniband"),
    ):
        with pytest.raises(NearUnknownError, match=re.escape(text)):
            near_gpu(here, kind, address)
    with pytest.raises(NearUnknownError, match="no EFA"):
        near_number(machine, EFA, 0, 1)


def test_the_doctor_shows_them() -> None:
    machine = examined(recorded("two-sockets-8x8"))
    text = "\n".join(machine_lines(machine))
    for number, gpu in enumerate(machine.gpus):
        assert f"{gpu.address}: verbs:mlx5_{number} (near GPU {gpu.address} of 8 alike)" in text
    told = json.loads(json.dumps(to_json(machine, [])))["near"]
    assert [one["near"]["devices"] for one in told] == [[f"mlx5_{number}"] for number in range(8)]
    nowhere = replace(machine, nics=tuple(replace(nic, node=None) for nic in machine.nics))
    said = {one.unknown for one in near_gpus(nowhere)}
    assert said == {"no RDMA NIC has its device file in /dev/infiniband"}
    assert f"all of verbs, since those near are not known: {said.pop()}" in "\n".join(machine_lines(nowhere))
