"""A serving engine without a model: real pages, real handovers, and answers that tell right KV from wrong.

It speaks vLLM's HTTP API and kvik's handover, has a paged KV pool of a model's true size and layout, batches
continuously, and takes as long as a stated compute model says. What it does not have is weights: every page's
bytes are a function of (layer, head, all tokens up to that position), and the next token depends on every
byte of every page of its request. So KV that is wrong, stale, missing or misplaced gives other tokens.

Read in this order: `content` (that function and its reading) -> `tokens` -> `pool` (which page is whose) ->
`requests` and `scheduler` (a step's work) -> `memory`, `rank` (one rank's process) over `wire` -> `replica`
(ranks of one data-parallel index, and their steps) -> `front` (all replicas) -> `api`, `web` (OpenAI's face),
with `compute`, `faults`, `metrics` and `options` beside them; and with a store `store_option`, `store_side`
(the scheduler's half) and `store_rank` (a rank's).
"""
