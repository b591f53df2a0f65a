"""The fault lab: real processes that are killed, stopped, cut off and lied to, and what must hold then.

Each tool is a module to run: `python -m tests.faults.lab`, `late_write`, `detection`, `false_deaths`, `idle`.
The tests of this folder run a small share of each.
"""
