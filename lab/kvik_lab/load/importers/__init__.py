"""What other tools have measured, in the form of the lab's own load driver.

A reader takes the text of a file and its name for messages, and raises `LabError` that says what is not
there. What a tool does not record is left out; nothing is made up in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from kvik_lab.errors import LabError
from kvik_lab.load.importers.aiperf import read_aiperf
from kvik_lab.load.importers.guidellm import read_guidellm
from kvik_lab.load.importers.network import read_iperf3, read_nccl_tests, read_perftest
from kvik_lab.load.importers.storage import read_fio
from kvik_lab.load.importers.transfer import read_nixlbench, read_transfer_engine_bench
from kvik_lab.load.importers.vllm_bench import read_vllm_bench
from kvik_lab.records import LoadResult

FORMATS: Mapping[str, Callable[[str, str], LoadResult]] = {
    "aiperf": read_aiperf,
    "fio": read_fio,
    "guidellm": read_guidellm,
    "iperf3": read_iperf3,
    "nccl-tests": read_nccl_tests,
    "nixlbench": read_nixlbench,
    "perftest": read_perftest,
    "transfer_engine_bench": read_transfer_engine_bench,
    "vllm-bench": read_vllm_bench,
}


def read_foreign(form: str, path: Path) -> LoadResult:
    """Read a file of another tool. Raises `LabError`."""
    if form not in FORMATS:
        raise LabError(f"{form!r} is no format that is known; there are {', '.join(FORMATS)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LabError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    try:
        return FORMATS[form](text, str(path))
    except OverflowError as error:
        raise LabError(f"{path}: has a number that is no time: {error}") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise LabError(f"{path}: gives no record: {where} is {wrong['input']!r}: {wrong['msg']}") from error
    except LabError:
        raise
    except ValueError as error:  # of rows with fewer cells than their heading, or a count of many digits
        raise LabError(f"{path}: is none of {form}: {error}") from error
