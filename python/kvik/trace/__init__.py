"""``kvik trace``: which pages an engine's transfers moved, recorded and moved again.

A recording holds ids, sizes and times: no data, no secrets, no addresses; a peer is a number. `file` reads
one, `record` takes one from a running engine, `replay` moves the same page sets between two engines of its
own.
"""
