"""What turns a resolved run into roles."""

from __future__ import annotations

from collections.abc import Mapping

from kvik_lab.run.drivers import emulator, vllm
from kvik_lab.run.drivers.system import Driver

DRIVERS: Mapping[str, Driver] = {"emulator": emulator.Emulator(), "vllm": vllm.Vllm()}
"""By the name that the study file gives."""
