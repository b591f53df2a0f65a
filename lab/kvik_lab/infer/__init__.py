"""Inference: what measurements say, with intervals that hold for what was measured.

Values of one server start depend on each other, each start has a level of its own, levels change in mid-run,
and thirty values say nothing of a 99th percentile. Everything here respects that, or refuses. What others
call:

Series of one start
    `changes.find_changes(values)` -> `Segmentation`: confirmed changes and the segments between them.
    `steady.examine({start: values})` -> `Steady`: per start segmentation and class, over all starts the class
    and the headline mean, which is None where a start is unsteady.
    `trailing.level_from(values, least)`: whether a series that goes on keeps a level by now.
    `coincide.coincidence([changes of A, changes of B], n)` -> `Coincidence`: do they fall together?

Levels with intervals (`arrays.Interval`; `arrays.TooFew` where n cannot say, with the n that would)
    `serial.mean_interval(values)`: one start, effective number of values.
    `steady.mean_over_starts(means)`: the mean that further starts would have.
    `order.quantile(values, 0.99)`, `order.quantile_over_starts`: distribution-free.

Comparisons (B over A, A the base)
    `judge.judge(levels, layout)` -> `Judged`: the one analysis; report, compare and power call it.
    `compare.compare(Starts, Starts, margin=0.01)` -> `Comparison`, by `table.read(path)` or
    `table.Starts(source, {start: values}, {start: block})`.
    `permute.within_blocks` -> `Permutation`. `effect.log_ratio_of_series` -> `Difference`: one start each.

Before an experiment
    `power.promise`, `power.starts_needed`, `power.starts_for_width`, `power.Spread.of_start`.

All of them raise `kvik_lab.errors.LabError` for what they cannot work with, and are deterministic: what is
drawn is drawn from a seed that is an argument.
"""
