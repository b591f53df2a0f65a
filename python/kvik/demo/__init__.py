"""`kvik demo`: a prefill engine, a decode engine and a router on one machine, without a GPU and without a
download.

- `checkpoint`: a tiny model with random weights, made on the spot.
- `keeper`, `processes`: child processes that are up when they say so and gone when we are.
- `engines`: the command lines of the serving engines and of the router.
- `client`: requests, and what came back when.
- `reports`: what the decode engine's connector says about each handover.
- `show`: the demo itself.

The acceptance tests with real serving engines start theirs through the same modules.
"""
