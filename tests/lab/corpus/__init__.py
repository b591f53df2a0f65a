"""Sixty tables as people publish benchmark results, made by simulation, each also with one error.

The truth is known because the tables are made from it: which cells derive from which, what follows from the
printed numbers, and which one was spoiled. Nothing here knows how the audit works.
"""
