"""The study file: what varies, what is possible, what is run, and when it is enough.

>>> from kvik_lab.study import expand_layers, load_study
>>> study = load_study("efa-vs-tcp.yaml")     # StudyError: all mistakes, each with line, column and remedy
>>> study.factors                             # kvik_lab.design.factor.Factor, in the order of the file
>>> study.candidates()                        # a pandas frame of the feasible combinations
>>> study.infeasible()                        # the others, with `constraint` and `why`
>>> study.violations({"tokens": 20000})       # each constraint that one combination violates
>>> study.model                               # the formula as it is written, or None; its names are factors
>>> study.design                              # kind, runs, starts, blocks, seed, anchors, layers, patterns
>>> expand_layers(study)                      # [Pattern(id, layer, levels, duplicate_of)] of a layered design
>>> study.cost.minutes_per_run                # cost, warmup, gates: what the file says

In a frame, a factor that does not exist in a row (it is nested) is NaN among numbers and None among others.
"""

from kvik_lab.study.evaluate import Violation
from kvik_lab.study.layers import Layer, Pattern, expand_layers
from kvik_lab.study.load import load_study, parse_study
from kvik_lab.study.model import Anchors, Cost, Design, Study, Warmup
from kvik_lab.study.problems import Problem, StudyError
from kvik_lab.study.unit import Model, Unit

__all__ = [
    "Anchors", "Cost", "Design", "Layer", "Model", "Pattern", "Problem", "Study",
    "StudyError", "Unit", "Violation", "Warmup", "expand_layers", "load_study", "parse_study",
]  # fmt: skip
