"""Five published articles redrawn from the numbers that they print, each beside its audit.

`printed.read_article` reads the facts of one (`printed/S0.yaml` to `S4.yaml`); `redraw.redraw` makes its
report with the lab's own analyses. `python -m tests.lab.redrawn` writes them.
"""
