"""Inference: what measurements say, with intervals that hold for what was measured.

Values of one server start depend on each other, each start has a level of its own, levels change in mid-run,
and thirty values say nothing of a 99th percentile. Everything here respects that, or refuses. What others
call:

Series of one start
    `changes.find_changes(values)` -> `Segmentation`: confirmed changes and the segments between them.
    `steady.examine({start: values})` -> `Steady`: per start segmentation and class, over all starts the class
    and the headline mean, which is None where a start is unsteady.
    `coincide.coincidence([changes of A, changes of B], n)` -> `Coincidence`: do they fall together?

Levels with intervals (`arrays.Interval`; `arrays.TooFew` where n cannot say, with the n that would)
    `serial.mean_interval(values)`: one start, effective number of values. `serial.naive_interval`: to show
    beside.
    `starts.mean_over_starts([values, ...])` -> `OverStarts`: the mean that further starts would have.
    `order.quantile(values, 0.99)`, `order.median_interval`, `order.needed_for_bound`: distribution-free.
    `location.hodges_lehmann`, `location.shift`, `location.bca`: of independent values.

Comparisons (B over A, A the base)
    `compare.compare(Starts, Starts, margin=0.01)` -> `Comparison`, by `table.read(path)` or
    `table.Starts(source, {start: values}, {start: block})`.
    `permute.sign_flip`, `permute.within_blocks` -> `Permutation`.
    `effect.log_ratio`, `paired_log_ratio`, `log_ratio_of_series` -> `Difference`, which gives `.ratio()`,
    `.p()`;
    `effect.equivalence(difference, margin)`, `effect.cliffs_delta`, `effect.brunner_munzel`.
    `multiple.holm`, `multiple.benjamini_hochberg`: adjusted p-values of a table.

Before and during an experiment
    `power.power`, `power.units_needed`, `power.Spread.of_start`.
    `sequential.StopRule`, `sequential.look`, `sequential.follow` -> `Record`.
    `metrics.Metric`, `Timeline.get`, `TransferCost`: what is measured of a request.

All of them raise `kvik_lab.errors.LabError` for what they cannot work with, and are deterministic: what is
drawn is drawn from a seed that is an argument.
"""
