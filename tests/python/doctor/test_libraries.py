"""Libraries: what the engine's packages bring, what their files say, and copies that cannot live together."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kvik.doctor import examine, findings, live, load
from kvik.doctor.libraries import words
from kvik.doctor.model import Library, Machine
from kvik.doctor.rules_libraries import of_host
from kvik.doctor.saving import save
from kvik.doctor.tree import SITE, RecordedTree
from tests.python.doctor.machines import recorded
from tests.python.doctor.small import examined

NIXL = f"{SITE}/nixl_cu13.libs/libibverbs-1de1263b.so.1.14.48.0"


def by_path(machine: Machine) -> dict[str, Library]:
    return {library.path: library for library in machine.libraries}


def test_each_copy_is_known_by_version_and_path() -> None:
    found = by_path(examined(recorded("two-sockets-8x8", "verbs-twice")))
    nccl = found[f"{SITE}/nvidia/nccl/lib/libnccl.so.2"]
    assert (nccl.name, nccl.version, nccl.origin) == ("libnccl", "2.27.3", "engine")
    host = found["/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0"]
    assert (host.origin, host.bundled, host.drivers) == ("system", False, ("mlx5",))
    assert host.driver_folder == "/usr/lib/x86_64-linux-gnu/libibverbs"
    copy = found[NIXL]
    assert (copy.version, copy.origin, copy.bundled, copy.package) == (
        "1.14.48.0", "engine", True, "nixl_cu13.libs",
    )  # fmt: skip
    assert (copy.driver_folder, copy.drivers) == ("/usr/lib64/libibverbs", ())


def test_versions_of_an_interface_are_those_of_the_file() -> None:
    found = by_path(examined(recorded("p5.48xlarge", "old-fabric")))
    assert found["/opt/amazon/efa/lib/libfabric.so.1.27.0"].interface == 6
    assert found["/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"].interface == 7


def test_a_second_copy_is_told_with_what_it_costs() -> None:
    (finding,) = findings(examined(recorded("two-sockets-8x8", "verbs-twice")))
    assert finding.device == NIXL
    assert "it looks for drivers of NICs in /usr/lib64/libibverbs, and none is there" in finding.fact
    assert finding.cost.fails
    assert "nixl_cu13 that takes the host's" in finding.advice


def test_a_copy_whose_drivers_are_there_costs_less() -> None:
    document = recorded("two-sockets-8x8", "verbs-twice")
    document["files"]["/usr/lib64/libibverbs/libmlx5-rdmav34.so"] = ""
    (finding,) = findings(examined(document))
    assert finding.code == "library-twice"
    assert not finding.cost.fails
    assert "none is there" not in finding.fact


def test_a_copy_that_nothing_else_has_is_no_second_one() -> None:
    document = recorded("two-sockets-8x8", "verbs-twice")
    document["files"] = {
        path: text for path, text in document["files"].items() if not path.startswith("/usr/lib/x86_64")
    }
    assert findings(examined(document)) == []


def test_a_machine_without_hardware_has_nothing_to_lose() -> None:
    document = recorded("two-sockets-8x8", "verbs-twice")
    document["links"] = {
        path: target
        for path, target in document["links"].items()
        if "infiniband" not in path and "/sys/bus/pci/" not in path
    }
    assert findings(examined(document)) == []


def test_a_plug_in_gets_the_libfabric_beside_it() -> None:
    document = recorded("p5.48xlarge", "old-fabric")
    beside = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libfabric.so.1.28.0"
    document["files"][beside] = "FABRIC_1.8"
    assert findings(examined(document)) == []
    document["files"][beside] = "FABRIC_1.5"
    (finding,) = findings(examined(document))
    assert f"needs FABRIC_1.7, and {beside} (1.28.0) has FABRIC_1.5" in finding.fact


def test_the_vendors_copy_is_before_the_systems() -> None:
    document = recorded("p5.48xlarge")
    document["files"]["/usr/lib/x86_64-linux-gnu/libfabric.so.1.20.0"] = "FABRIC_1.5"
    machine = examined(document)
    host = of_host(machine.libraries, "libfabric")
    assert host is not None
    assert host.path == "/opt/amazon/efa/lib/libfabric.so.1.27.0"
    assert findings(machine) == []


def test_packages_that_were_not_read_are_named() -> None:
    document = recorded("two-sockets-8x8")
    document["files"] = {path: text for path, text in document["files"].items() if SITE not in path}
    assert (SITE, "absent") in {(one.path, one.reason) for one in examined(document).unread}


def test_only_what_is_looked_at_is_recorded_of_a_library() -> None:
    text = "\0FABRIC_1.7\0secret\0/usr/lib64/libibverbs\0/etc/libibverbs.d\0FABRIC_1.7\0/x/libibverbs.so.1\0"
    assert words(text) == "/usr/lib64/libibverbs\nFABRIC_1.7"
    assert words(words(text)) == words(text)


def test_a_saved_clash_is_the_clash() -> None:
    document = recorded("two-sockets-8x8", "verbs-twice")
    saved = save(RecordedTree(document), "a machine", "host")
    assert findings(examined(saved)) == findings(examined(document))
    assert by_path(examined(saved)).keys() == by_path(examined(document)).keys()


def test_this_pythons_packages_are_looked_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real files: the host's libibverbs, copied as a wheel has it."""
    real = next(
        (one for one in examine(live()).libraries if one.name == "libibverbs" and one.origin == "system"),
        None,
    )
    if real is None:
        pytest.skip("libibverbs is not installed")
    site = tmp_path / "owner" / "lib" / "python3.11" / "site-packages"
    (site / "some_wheel.libs").mkdir(parents=True)
    shutil.copy(real.path, site / "some_wheel.libs" / "libibverbs-0a1b2c3d.so.1.14.0.0")
    (site.parents[1] / "libnccl-net.so").write_bytes(b"\x7fELF\0FABRIC_1.7\0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    copies = [one for one in examine(live()).libraries if str(tmp_path) in one.path]
    assert [(one.name, one.version, one.driver_folder, one.drivers) for one in copies] == [
        ("libnccl-net", "", None, ()),
        ("libibverbs", "1.14.0.0", real.driver_folder, real.drivers),
    ]
    assert real.driver_folder
    assert copies[0].interface == 7
    text = json.dumps(save(live(), "this"))
    assert str(tmp_path) not in text
    again = by_path(examine(RecordedTree(json.loads(text))))
    assert (
        again[f"{SITE}/some_wheel.libs/libibverbs-0a1b2c3d.so.1.14.0.0"].driver_folder == real.driver_folder
    )
    assert again["/elsewhere/lib/libnccl-net.so"].interface == 7


def test_a_folder_that_was_recorded_by_hand(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    folder = tmp_path / SITE[1:] / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    assert [(one.name, one.version) for one in examine(load(tmp_path)).libraries] == [("libnccl", "2")]


def test_an_older_libcuda_beside_the_hosts_is_not_used() -> None:
    """A container's runtime mounts the host's libcuda into the folder where the image has one of its own."""
    document = recorded("two-sockets-8x8")
    folder = "/usr/lib/x86_64-linux-gnu"
    document["files"][f"{folder}/libcuda.so.535.104.05"] = ""
    assert findings(examine(RecordedTree(document))) == []
    del document["files"][f"{folder}/libcuda.so.570.133.20"]
    (finding,) = findings(examine(RecordedTree(document)))
    assert (finding.code, finding.device) == ("library-older-than-driver", f"{folder}/libcuda.so.535.104.05")
