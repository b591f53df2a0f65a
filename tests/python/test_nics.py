"""Transfers by NICs: libfabric, on the provider that needs no device, and a plug-in made of sockets."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

import kvik

LAYOUT = kvik.Layout(pages=16, run_bytes=64 << 10)


def test_pages_go_both_ways() -> None:
    with (
        kvik.Engine(nics="libfabric:tcp", transport="nics") as owner,
        kvik.Engine(nics="libfabric:tcp", transport="nics") as other,
    ):
        there = np.random.default_rng(5).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
        here = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
        theirs = owner.register(there).pages(LAYOUT, range(16))
        mine = other.register(here).pages(LAYOUT, range(16))
        report = other.read(mine, owner.grant(theirs).ticket).wait()
        assert (report.transport, report.mechanism, report.bytes) == ("libfabric", "tcp", LAYOUT.nbytes)
        assert np.array_equal(here, there)
        here[:] = 7
        other.write(mine, owner.grant(theirs, right="write").ticket).wait()
        assert (there == 7).all()


def test_the_environment_names_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_NICS", "efa")
    with pytest.raises(kvik.TransportUnavailable, match='provider "efa"'):
        kvik.Engine()


def test_a_library_that_is_not_there() -> None:
    # Another copy would be taken if this process had one.
    with pytest.raises(kvik.TransportUnavailable, match="libfabric"):
        kvik.Engine(nics="libfabric:none", nic_library="/no/such/libfabric.so.1")


def test_a_plug_in_moves_pages_and_reports_name_it(tmp_path: Path) -> None:
    sample = Path(__file__).parents[2] / "examples" / "plugin"
    subprocess.run(["make", "-C", sample, f"OUT={tmp_path}"], check=True, timeout=120, capture_output=True)
    library = tmp_path / "kvik-sample.so"
    with (
        kvik.Engine(nics="plugin", nic_library=library, transport="nics") as owner,
        kvik.Engine(nics="plugin:sample1", nic_library=library, transport="nics") as other,
    ):
        there = np.random.default_rng(6).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
        here = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
        theirs = owner.register(there).pages(LAYOUT, range(16))
        mine = other.register(here).pages(LAYOUT, range(16))
        report = other.read(mine, owner.grant(theirs).ticket).wait()
        assert (report.transport, report.mechanism, report.bytes) == ("plugin", "sample", LAYOUT.nbytes)
        assert np.array_equal(here, there)


def test_a_plug_in_is_never_searched_for() -> None:
    with pytest.raises(kvik.InvalidArgument, match="KVIK_NIC_LIBRARY"):
        kvik.Engine(nics="plugin")
    with pytest.raises(kvik.TransportUnavailable, match="/no/such/plugin"):
        kvik.Engine(nics="plugin", nic_library="/no/such/plugin.so")
