"""`kvik demo`: a prefill engine, a decode engine and a router on one machine, without a GPU and without a
download.

What runs:

- `scene`: what the demo needs of the engines that it shows; `emulator_scene` and `vllm_scene` start them.
- `engines`, `checkpoint`: vLLM's command lines, the router's, and a tiny model made on the spot.
- `keeper`, `processes`: child processes that are up when they say so and gone when we are.
- `links`: two hosts on this one, joined by a cable of a stated rate. `machine`: its memory.

What is measured and shown:

- `client`: requests, and what came back when. `reports`: what the decode engine says about each handover.
- `measure`: one prompt answered twice, and the verdict. `timeline`: where the time of one request went.
- `table`, `picture`, `svg`, `telling`, `words`: how that is shown.
- `show`: the command.

The acceptance tests with real serving engines start theirs through the same modules.
"""
