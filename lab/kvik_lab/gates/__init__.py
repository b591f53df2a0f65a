"""The gates V1 to V9: whether a run measured what its study says it measures.

Each gate is a function from a record to a `Finding`; it looks at counters before and after and at what the
client saw, and starts nothing. `judge` asks all of them. A run is invalid where something of it is shown to
be wrong, suspect where something could not be shown to be right, else valid. An invalid run enters no mean.
"""

from kvik_lab.gates.judge import GATES, judge, judge_study

__all__ = ["GATES", "judge", "judge_study"]
