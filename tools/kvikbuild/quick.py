"""`make test QUICK=1`: what is worth waiting for while one works, in under six minutes on two cores.

It leaves out, and says so by name, what starts many processes, what takes virtual machines, network
namespaces or serving engines, and most of the simulator's schedules. `make test` alone says that all is well.
"""

SCHEDULES = "3000"  # of the simulator
ALL_SCHEDULES = "200000"  # that `make test` runs

# Of all crates at once: cargo would build them again, with the features of one package alone. Unit tests of
# every crate, and all tests of those crates that start no process and ask no kernel.
RUST = ("--workspace", "--lib", *(word for name in (
    "properties", "tokens", "stream", "golden", "proto", "sim", "fence_model", "models",
) for word in ("--test", name)))  # fmt: skip

# Stages of `make test`, and what they would have shown.
STAGES = {
    "rust": "tests of engines, transports and the router, and most of the simulator's schedules",
    "packaging": "the wheel as a stranger gets it",
    "lab": "the lab against known truths",
    "docs": "the site, and every command in the documentation",
    "netns": "two hosts in network namespaces",
    "faults": "processes that are killed, stopped and lied to",
    "fabric": "a newer libfabric",
    "rdma": "soft-RoCE devices in a virtual machine",
    "vllm-env": "the environment of the serving engine",
    "vllm": "real serving engines",
}

# Of the tests that the stage `python` runs: a new file is among the quick ones until it is named here.
PYTHON = {
    "tests/hostile": "peers that misbehave for a while",
    "tests/router": "routers, started as programs",
    "tests/python/emulator": "emulated serving engines, each several processes",
    "tests/python/test_bench.py": "benchmarks between two processes",
    "tests/python/test_citizen.py": "processes that fork, leak and end",
    "tests/python/test_demo_run.py": "whole demos",
    "tests/python/test_chart_runs.py": "what containers of the chart would start",
    "tests/python/test_deploy_runs.py": "what containers would start",
    "tests/python/test_deploy_store_runs.py": "what containers of a store would start",
    "tests/python/test_gpu_handover.py": "handovers between processes that have a GPU",
    "tests/python/test_gpu_peers.py": "pages between processes that have a GPU",
    "tests/python/test_handover_engines.py": "handovers between engines",
    "tests/python/test_logging.py": "logs of processes",
    "tests/python/test_mutants.py": "whether mutants still apply",
    "tests/python/test_selftest.py": "whole self-tests",
    "tests/python/test_trace.py": "recordings, moved again",
    "tests/python/test_vllm_ends.py": "how requests end in the connector",
    "tests/python/test_vllm_lives.py": "lives of requests in the connector",
}

LEFT_OUT = [*STAGES.items(), *((f"python: {name}", why) for name, why in PYTHON.items())]
