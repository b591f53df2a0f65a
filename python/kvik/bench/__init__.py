"""Benchmarks: what a batch of pages costs through kvik, beside the limits of the machine; a whole context.

Read in this order: ``cli`` (options) -> ``options`` (the plan, sizes, what was changed) -> ``run`` (cells,
rounds, slices) -> ``contenders`` (kvik) and ``limits`` (memcpy, one TCP stream) -> ``figures`` -> ``report``.
The other side is ``target``, a process of its own; both talk over ``control``. ``context`` is a command
of its own, with both of its sides in ``context_side``.
"""
