"""``kvik selftest``: what an owner of RDMA hardware runs to see that kvik works there, and how fast.

Read in this order: ``cli`` (options) -> ``plan`` (what was asked for, what is used) -> ``run`` (the parts in
order) -> ``part`` (a part and its bound) -> ``sides`` (an engine here, a target there) and ``other`` (that
target). The parts: ``here``, ``conformance`` (with ``landing``, ``refusals``, ``ends``, ``death``),
``first``, ``sweep``, ``grid`` (both with ``mover``), ``nics``. ``report`` is the JSON, ``summary`` the
Markdown.
"""
