"""What is counted around a run: by a server over HTTP, and by kvik's engines on this node.

Everything is asked before and after, never during: a run is not disturbed by its own observation.
"""

from kvik_lab.observe.clocks import Clocks, clocks, step
from kvik_lab.observe.engines import added, engine_counters, engines_of
from kvik_lab.observe.prometheus import parse, scrape

__all__ = ["Clocks", "added", "clocks", "engine_counters", "engines_of", "parse", "scrape", "step"]
