"""The desktop PCs of the article "LLM cluster of vLLM and RDMA" (4), and a pair of workstations with RoCE.

The article says: RTX 4000 Ada, ConnectX-5, boards of which two have the chipsets H670 and H770; first the
NIC in the CPU's x16 slot and the GPU in an x4 slot of the chipset; then the GPU in an external box, by
OCuLink, on the CPU's x4 port for NVMe; then the GPU in the x16 slot and the NIC in the chipset's x4 slot.
It does not name the other two boards (here B660 and Z790), nor the generation of the slots (here 4.0, as
the chipsets have).

Numbers of the ports are Intel's: 00:01.0 the x16 slot, 00:06.0 the x4 port, 00:1c.4 of the chipset. Ids are
those of pci.ids.
"""

from __future__ import annotations

from tests.python.doctor.machines.recording import GIB, Device, Machine, bridge

V1, V2 = "IB/RoCE v1", "RoCE v2"
GIDS = (
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", V1),
    ("fe80:0000:0000:0000:0000:00ff:fe00:0001", V2),
    ("0000:0000:0000:0000:0000:ffff:c000:020a", V1),  # 192.0.2.10, an address for documentation
    ("0000:0000:0000:0000:0000:ffff:c000:020a", V2),
)
CHIPSETS = {"H670": 0x7A85, "H770": 0x7A05, "B660": 0x7A86, "Z790": 0x7A04}
BEFORE, OCULINK, EXCHANGED = "before", "gpu-by-oculink", "gpu-and-nic-exchanged"


def _gpu(address: str, lanes: int) -> Device:
    # An idle GPU lowers the speed of its link to 2.5 GT/s, which is no fault.
    return Device(
        address, "gpu", 0x10DE, 0x27B2, (2.5, lanes), (16.0, 16), driver="nvidia",
        bar1=32 * GIB, name="NVIDIA RTX 4000 Ada Generation",
    )  # fmt: skip


def _connectx5(address: str, lanes: int) -> Device:
    return Device(
        address, "nic", 0x15B3, 0x1017, (8.0, lanes), (8.0, 16), driver="mlx5_core", name="mlx5_0",
        rate="100 Gb/sec (4X EDR)", net="enp1s0np0", mtu=9000, gids=GIDS,
    )  # fmt: skip


def desktop(chipset: str, state: str) -> Machine:
    """One of the PCs, in one of the article's three states."""
    wide, narrow, behind = ("0000:01:00.0", 16), ("0000:02:00.0", 4), ("0000:03:00.0", 4)
    gpu = _gpu(*{BEFORE: behind, OCULINK: narrow, EXCHANGED: wide}[state])
    nic = _connectx5(*(behind if state == EXCHANGED else wide))
    ssd = Device("0000:04:00.0", "nvme", 0x144D, 0xA80C, (16.0, 4), (16.0, 4), driver="nvme")

    def port(address: str, device: int, bus: tuple[str, int], most: float) -> Device:
        below = [one for one in (gpu, nic) if one.address == bus[0]]
        speed = min((below[0].most or (0, 0))[0], most) if below else 2.5
        return bridge(address, below, (speed, bus[1] if below else 0), most=(most, bus[1]), device=device)

    return Machine(
        f"desktop-{chipset.lower()}-{state}",
        ("a board maker", f"{chipset} board"),
        [
            port("0000:00:01.0", 0x460D, wide, 32.0),
            port("0000:00:06.0", 0x464D, narrow, 16.0),
            bridge("0000:00:1a.0", [ssd], (16.0, 4), device=0x7AC8),
            port("0000:00:1c.4", 0x7ABC, behind, 16.0),
            Device("0000:00:1f.0", "lpc", 0x8086, CHIPSETS[chipset]),
        ],
    )


DESKTOPS = [desktop(chipset, state) for chipset in CHIPSETS for state in (BEFORE, OCULINK, EXCHANGED)]


def workstation(name: str) -> Machine:
    """A workstation whose CPU has lanes for both: RTX 4000 Ada and ConnectX-6 Dx, x16 each (ids: pci.ids)."""
    nic = Device(
        "0000:41:00.0", "nic", 0x15B3, 0x101D, (16.0, 16), (16.0, 16), driver="mlx5_core", name="mlx5_0",
        rate="100 Gb/sec (4X EDR)", net="ens1np0", mtu=9000, gids=GIDS,
    )  # fmt: skip
    amd = {"vendor": 0x1022, "device": 0x14AB}
    return Machine(
        name,
        ("a board maker", "workstation board"),
        [
            bridge("0000:00:01.1", [_gpu("0000:01:00.0", 16)], (16.0, 16), most=(32.0, 16), **amd),
            bridge("0000:40:01.1", [nic], (16.0, 16), most=(32.0, 16), **amd),
        ],
        cpus=32,
        memory=128 * GIB,
    )


# The article's tables: change of tokens a second in per cent by (TP, PP) and model; "1-2 %" is (1, 2).
Change = tuple[float, float]
OTHERS = "others"
MEASURED: dict[str, dict[tuple[int, int], dict[str, Change]]] = {
    OCULINK: {
        (1, 1): {OTHERS: (0.0, 1.0)},
        (2, 1): {"Llama-3.2-1B": (8.6, 8.6), "Llama-3.2-3B": (4.5, 4.5), OTHERS: (1.0, 2.0)},
        (4, 1): {"Llama-3.2-1B": (8.3, 8.3), "Llama-3.2-3B": (8.3, 8.3), OTHERS: (3.0, 4.0)},
        (2, 2): {"Llama-3.2-1B": (6.7, 6.7), "Llama-3.2-3B": (5.7, 5.7), OTHERS: (2.0, 3.0)},
    },
    EXCHANGED: {
        (1, 1): {OTHERS: (-1.0, 1.0)},
        (2, 1): {"Llama-3.2-1B": (-7.0, -7.0), "Llama-3.2-3B": (-4.8, -4.8), OTHERS: (-2.0, -1.0)},
        (4, 1): {
            "Llama-3.2-1B": (-19.7, -19.7), "Llama-3.2-3B": (-19.0, -19.0), "Llama-2-7b": (-13.8, -13.8),
            "Llama-3-8B": (-13.0, -13.0), OTHERS: (-14.0, -8.0),
        },
        (2, 2): {"Llama-3.2-1B": (-3.4, -3.4), "Llama-3.2-3B": (-5.4, -5.4), OTHERS: (-2.0, -1.0)},
    },
}  # fmt: skip
