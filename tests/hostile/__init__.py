"""Peers that misbehave, against an engine of their own: `python -m tests.hostile.run` prints a table."""
