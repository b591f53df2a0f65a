"""`kvik store bench`: what a store is good for, measured on the machine that it is asked on.

- `copies`: blocks through a store beside memory copies of the same blocks, for the shapes of `models`. The
  blocks are those of `pages`, the copies those of `baselines`; `served` starts the store, and `beside` other
  stores that are measured in the same rounds.
- `misses`: what a store costs an engine that finds nothing in it.
- `live`: a trace through a server and a client; each policy by itself is native.
- `figures`: medians, ratios and tables. `cli`: the commands.
"""
