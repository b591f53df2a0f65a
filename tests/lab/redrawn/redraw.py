"""Which articles can be redrawn, and by what."""

from __future__ import annotations

import importlib

from kvik_lab.errors import LabError
from kvik_lab.report.model import Report
from tests.lab.redrawn.coverage import section
from tests.lab.redrawn.printed import NAMES


def redraw(name: str) -> Report:
    """The report of an article, with what of the checklist it covers.

    Raises LabError for a name that is none of `printed.NAMES`.
    """
    if name not in NAMES:
        raise LabError(f"there is no article {name!r}; there are {', '.join(NAMES)}")
    report = importlib.import_module(f"tests.lab.redrawn.{name.lower()}").redraw()
    return Report(report.title, (*report.sections, section(name, report)))
