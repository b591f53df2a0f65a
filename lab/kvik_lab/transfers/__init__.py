"""Transfers of pages between two of kvik's engines, without a serving system.

`kvik bench transfer` moves and checks them: its target is a role of the start, and its initiator the load of
a run. `spec.py` is what a study says of it, `measure.py` goes from there to the command, and from its result
to the parts of a run's record.
"""
