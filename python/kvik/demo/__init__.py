"""`kvik demo`: a prefill engine, a decode engine and a router on one machine, without a GPU and without a
download.

What runs:

- `scene`: what the demo needs of the engines that it shows; `emulator_scene` and `vllm_scene` start them.
- `engines`, `checkpoint`: vLLM's command lines, the router's, and a tiny model made on the spot.
- `restart`: the second act, with a store.

Child processes that are up when they say so and gone when we are, and two hosts on this one, joined by a
cable of a stated rate, are `kvik.roles`.

What is measured and shown:

- `client`: requests, and what came back when. `reports`: what the decode engine says about each handover.
- `measure`: one prompt answered twice, and the verdict. `timeline`: where the time of one request went.
- `table`, `picture`, `svg`, `telling`, `words`: how that is shown.
- `show`: the command.

The acceptance tests with real serving engines start theirs through the same modules.
"""
