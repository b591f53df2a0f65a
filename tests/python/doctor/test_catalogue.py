"""The catalogue of instances agrees with the recorded machines and with the documentation."""

from __future__ import annotations

import re

import pytest

from kvik.config import ENTRIES
from kvik.doctor.catalogue import INSTANCES, Instance, differences, instance_of, rows
from tests.docs.pages import ROOT
from tests.python.doctor.machines import MACHINES

EFA = (ROOT / "docs" / "efa.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda one: one.name)
def test_a_recorded_machine_is_what_the_catalogue_says(instance: Instance) -> None:
    """Counts and rates of the recording are the catalogue's, and it is found by the board's name."""
    machine = MACHINES[instance.name]
    efas = machine.those("efa")
    rates = tuple(float(efa.rate.split()[0]) for efa in efas)
    assert instance_of(" ".join(machine.board)) is instance
    assert rates == (instance.rate_gbits,) * instance.nics
    assert differences(instance, len(efas), rates, len(machine.those("gpu"))) == []


def test_a_machine_that_differs_is_told_how() -> None:
    """One sentence each: fewer NICs than the type has, a slower one, and a GPU that is gone."""
    p5 = instance_of("Amazon EC2 p5.48xlarge")
    assert p5 is not None
    said = differences(p5, 31, (100.0,) * 30 + (50.0,), 7)
    assert len(said) == 3
    assert "7 GPUs" in said[0]
    assert "31 EFA" in said[1]
    assert "50 Gbit/s" in said[2]
    assert instance_of("a board maker p5") is None


def test_the_table_of_the_documentation_is_the_catalogue() -> None:
    """Row by row."""
    written = [
        tuple(cell.strip() for cell in line.strip("|\n").split("|"))
        for line in EFA.splitlines()
        if re.match(r"\| `[a-z0-9-]+\.\d+xlarge` \|", line)
    ]
    assert written == rows()


def test_variables_that_the_documentation_names_are_options() -> None:
    """Every KVIK_ variable of the pages for owners of hardware is one of an option of kvik."""
    known = {option.variable for entry in ENTRIES for option in entry.options}
    for name in ("efa.md", "roce.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert set(re.findall(r"KVIK_[A-Z_]+", text)) - known == set(), name
