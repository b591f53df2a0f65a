"""What turns a resolved run into roles."""

from __future__ import annotations

from collections.abc import Mapping

from kvik_lab.run.drivers import emulator, storage, transfers, vllm
from kvik_lab.run.drivers.system import Driver

DRIVERS: Mapping[str, Driver] = {
    "emulator": emulator.Emulator(), "storage": storage.Storage(), "transfers": transfers.Transfers(),
    "vllm": vllm.Vllm(),
}  # fmt: skip
"""By the name that the study file gives."""
