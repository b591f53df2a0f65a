"""`kvik store bench`: what a store is good for, measured on the machine that it is asked on.

- `copies`: blocks through a store beside memory copies of the same blocks, for the shapes of `models`. The
  blocks are those of `pages`, the copies those of `baselines`; `served` starts the store, and `beside` other
  stores that are measured in the same rounds.
- `hits`: prompts of which the store has some part, in two passes.
- `replay`: a trace against each policy, and through a server and a client.
- `figures`: medians, ratios and tables. `cli`: the commands.
"""
