"""What links carry, and what the article measured against what the model of a decode step says."""

from dataclasses import replace

import pytest

from kvik.doctor import Traffic, findings
from kvik.doctor.comparing import compare
from kvik.doctor.cost import change, predict
from kvik.doctor.links import payload_share, pcie_gbs
from kvik.doctor.model import Machine
from kvik.doctor.show import machine_lines
from tests.python.doctor.machines import STATES, recorded
from tests.python.doctor.machines.desktops import BEFORE as BEFORE_MOVING
from tests.python.doctor.machines.desktops import CHIPSETS
from tests.python.doctor.machines.desktops import EXCHANGED as SWAPPED
from tests.python.doctor.machines.desktops import MEASURED as TABLES
from tests.python.doctor.machines.desktops import OCULINK as OCULINKED
from tests.python.doctor.small import CHIPSET_X4, CPU_X4, CPU_X16, desktop, examined

BEFORE = examined(desktop(gpu=CHIPSET_X4, nic=CPU_X16))
OCULINK = examined(desktop(gpu=CPU_X4, nic=CPU_X16))
EXCHANGED = examined(desktop(gpu=CPU_X16, nic=CHIPSET_X4))

# The article's tables, per cent of tokens a second: (TP, PP), model, GPU moved to the CPU's x4 port by
# OCuLink, GPU and NIC exchanged. Columns of TP = 1 are "no difference", within 1 %.
MEASURED = [
    ((2, 1), "Llama-3.2-1B", 8.6, -7.0),
    ((2, 1), "Llama-3.2-3B", 4.5, -4.8),
    ((4, 1), "Llama-3.2-1B", 8.3, -19.7),
    ((4, 1), "Llama-3.2-3B", 8.3, -19.0),
    ((4, 1), "Llama-2-7b", 3.5, -13.8),
    ((4, 1), "Llama-3-8B", 3.5, -13.0),
    ((2, 2), "Llama-3.2-1B", 6.7, -3.4),
    ((2, 2), "Llama-3.2-3B", 5.7, -5.4),
]
# "The others", of which the article gives a range: here its middle. The model says too much of the exchange.
OTHERS = [
    ((2, 1), "Llama-2-7b", 1.5, -1.5),
    ((2, 1), "Llama-3-8B", 1.5, -1.5),
    ((2, 2), "Llama-2-7b", 2.5, -1.5),
    ((2, 2), "Llama-3-8B", 2.5, -1.5),
]


@pytest.mark.parametrize(
    ("gts", "lanes", "gbs"),
    [(2.5, 1, 0.25), (5.0, 8, 4.0), (8.0, 4, 3.938), (8.0, 16, 15.754), (16.0, 4, 7.877), (32.0, 16, 63.015),
     (64.0, 16, 118.0)],
)  # fmt: skip
def test_lanes_carry_what_the_specification_says(gts: float, lanes: int, gbs: float) -> None:
    assert pcie_gbs(gts, lanes) == pytest.approx(gbs, rel=1e-3)
    assert 0.84 < payload_share(128) < payload_share(256) < 0.92


def predicted() -> dict[tuple[tuple[int, int], str], tuple[float, float]]:
    rows = zip(predict(BEFORE, OCULINK), predict(BEFORE, EXCHANGED), strict=True)
    return {((first.tp, first.pp), first.model): (first.percent, second.percent) for first, second in rows}


def test_directions_are_those_of_the_article() -> None:
    said = predicted()
    for shape, model, oculink, exchanged in [*MEASURED, *OTHERS]:
        mine = said[shape, model]
        assert mine[0] * oculink > 0, (shape, model, mine)
        assert mine[1] * exchanged > 0, (shape, model, mine)
        assert min(map(abs, mine)) > 1, (shape, model, mine)
    for (tp, pp), model in said:
        if tp == 1:
            assert max(map(abs, said[(tp, pp), model])) < 1, (pp, model)


def test_figures_but_those_of_the_others_are_right_to_a_factor_of_about_two() -> None:
    said = predicted()
    for shape, model, oculink, exchanged in MEASURED:
        for mine, theirs in zip(said[shape, model], (oculink, exchanged), strict=True):
            assert 1 / 2.1 < mine / theirs < 2.1, (shape, model, mine, theirs)


def test_moves_are_ranked_as_measured() -> None:
    for tp in (2, 4):
        better, worse = (change(BEFORE, after, Traffic(tp=tp)) for after in (OCULINK, EXCHANGED))
        assert better is not None
        assert worse is not None
        assert better > 0 > worse


@pytest.mark.parametrize("chipset", CHIPSETS)
def test_each_recorded_pc_is_predicted_in_the_articles_direction(chipset: str) -> None:
    """In every column with TP above 1, for every model; and the exchange loses more than the other gains."""
    states = {state: examined(recorded(f"desktop-{chipset.lower()}-{state}")) for state in STATES}
    said: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for state in (OCULINKED, SWAPPED):
        for row in predict(states[BEFORE_MOVING], states[state]):
            said.setdefault(state, {}).setdefault((row.tp, row.pp), {})[row.model] = row.percent
    for state, columns in TABLES.items():
        for column, measured in columns.items():
            for model, percent in said[state][column].items():
                low, high = measured.get(model, measured["others"])
                if column[0] == 1:
                    assert abs(percent) <= 1, (state, column, model)
                else:
                    assert min(percent * low, percent * high) > 0, (state, column, model)
    worst = {
        state: min(min(models.values()) for models in columns.values()) for state, columns in said.items()
    }
    best = max(max(models.values()) for models in said[OCULINKED].values())
    assert worst[SWAPPED] < -10 < 0 <= worst[OCULINKED] < best < 10


def test_the_reason_of_each_move_is_found() -> None:
    assert [finding.code for finding in compare(BEFORE, OCULINK).gone] == ["gpu-behind-chipset"]
    moved = compare(BEFORE, EXCHANGED)
    assert [finding.code for finding in moved.new] == ["nic-link-narrow", "nic-behind-chipset"]
    assert {finding.code for finding in moved.gone} == {"gpu-behind-chipset", "gpu-link-narrow"}
    narrow = moved.new[0].cost
    assert narrow.gbs_could == pytest.approx(12.5)
    assert narrow.gbs_now == pytest.approx(3.938 * 256 / 280, rel=1e-3)


def test_a_fault_of_another_device_is_another_one() -> None:
    def broken(*names: str) -> Machine:
        (nic,) = EXCHANGED.nics
        (port,) = nic.ports
        nics = [
            replace(
                nic, name=name, ports=(replace(port, counters={"symbol_error": 9 if name in names else 0}),)
            )
            for name in ("mlx5_0", "mlx5_1")
        ]
        return replace(EXCHANGED, nics=tuple(nics))

    def told(before: Machine, after: Machine) -> tuple[list[str], list[str]]:
        found = compare(before, after)
        errors = [
            [one.device for one in some if one.code == "port-errors"] for some in (found.gone, found.new)
        ]
        return errors[0], errors[1]

    assert told(broken("mlx5_0", "mlx5_1"), broken("mlx5_0")) == (["mlx5_1"], [])
    assert told(broken("mlx5_0"), broken("mlx5_1")) == (["mlx5_0"], ["mlx5_1"])
    assert told(broken("mlx5_0"), broken("mlx5_0")) == ([], [])


def test_a_counter_that_makes_no_sense_is_no_error_of_a_port() -> None:
    (nic,) = EXCHANGED.nics
    port = replace(nic.ports[0], counters={"port_rcv_packets": -1})
    codes = {one.code for one in findings(replace(EXCHANGED, nics=(replace(nic, ports=(port,)),)))}
    assert "port-errors" not in codes


def test_a_gpu_with_all_lanes_beside_the_nic_has_no_findings() -> None:
    assert findings(examined(desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16)))) == []


def test_only_traffic_that_was_asked_for_is_judged() -> None:
    codes = {finding.code for finding in findings(EXCHANGED, Traffic(kv=True, collectives=False, load=False))}
    assert codes == {"nic-link-narrow"}
    assert findings(EXCHANGED, Traffic(kv=False, collectives=False, load=True)) == []


def test_pairs_name_their_bottleneck() -> None:
    pairs = {(pair.a, pair.b): pair for pair in BEFORE.pairs}
    to_nic = pairs["0000:01:00.0", "mlx5_0"]
    assert to_nic.gbs == pytest.approx(7.877, rel=1e-3)
    assert (to_nic.bottleneck, to_nic.chipset) == ("link of 0000:01:00.0, x4", 1)
    assert pairs["mlx5_0", "memory"].gbs == pytest.approx(15.754, rel=1e-3)
    assert pairs["mlx5_0", "wire"].gbs == 12.5
    assert BEFORE.dmi_gbs == pytest.approx(15.754, rel=1e-3)


def test_a_gpu_in_a_slower_slot_has_the_slots_speed() -> None:
    """An H100 (32 GT/s) in a server of 16 GT/s: its link has half of what the GPU could."""
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    gpu, port = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0", "/sys/devices/pci0000:00/0000:00:01.0"

    def paths() -> tuple[float | None, str]:
        machine = examined(document)
        assert findings(machine) == []
        (to_memory,) = [pair.gbs for pair in machine.pairs if (pair.a, pair.b) == ("0000:01:00.0", "memory")]
        return to_memory, next(line for line in machine_lines(machine) if "0000:01:00.0" in line)

    document["files"][f"{gpu}/max_link_speed"] = "32.0 GT/s PCIe"
    gbs, line = paths()
    assert gbs == pytest.approx(31.508, rel=1e-3)
    assert "x16 31.5 GB/s" in line
    # Idle, both ends show less; a virtual machine's port shows what is no slot's.
    for folder in (gpu, port):
        document["files"][f"{folder}/current_link_speed"] = "2.5 GT/s PCIe"
    assert paths()[0] == pytest.approx(31.508, rel=1e-3)
    document["files"][f"{port}/max_link_speed"] = "2.5 GT/s PCIe"
    document["files"][f"{port}/max_link_width"] = "1"
    assert paths()[0] == pytest.approx(63.015, rel=1e-3)


def test_a_switch_in_a_slower_slot_has_the_slots_speed() -> None:
    document = recorded("two-sockets-8x8")
    for path in document["files"]:
        if path.endswith("/0000:00:01.0/max_link_speed"):
            document["files"][path] = "16.0 GT/s PCIe"
    to_memory = {pair.a: pair.gbs for pair in examined(document).pairs if pair.b == "memory"}
    assert to_memory["0000:12:00.0"] == pytest.approx(31.508, rel=1e-3)
    assert to_memory["0000:1a:00.0"] == pytest.approx(63.015, rel=1e-3)


def test_few_lanes_in_a_slower_slot_cost_what_the_slot_could_give() -> None:
    document = desktop(gpu=("0000:00:01.0", 4), nic=("0000:00:02.0", 16))
    gpu = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    document["files"][f"{gpu}/max_link_speed"] = "32.0 GT/s PCIe"
    (finding,) = findings(examined(document))
    assert finding.code == "gpu-link-narrow"
    assert "x4 at 16 GT/s of x16: 7.9 of 31.5 GB/s" in finding.fact


def test_a_gpu_that_does_not_answer_has_no_lanes() -> None:
    """All bits are set in what is read of it: 63 lanes of 64 GT/s."""
    document = desktop(gpu=CPU_X16, nic=("0000:00:02.0", 16))
    gpu = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    for which in ("current", "max"):
        document["files"][f"{gpu}/{which}_link_width"] = "63"
    document["files"][f"{gpu}/current_link_speed"] = "Unknown"
    document["files"][f"{gpu}/max_link_speed"] = "64.0 GT/s PCIe"
    machine = examined(document)
    assert {pair.gbs for pair in machine.pairs if pair.a == "0000:01:00.0" and pair.b == "memory"} == {None}
    assert "x63" not in "\n".join(machine_lines(machine))
    said = {one.path: one.reason for one in machine.unread}
    assert "does not answer" in said["/sys/bus/pci/devices/0000:01:00.0"]
