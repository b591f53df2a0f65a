"""Make the environment of a system that kvik is measured beside, and print its Python.

    python3 tools/contenders.py               # which there are
    python3 tools/contenders.py nixl          # make it, if it is not there, and see that it works

An environment holds what tools/locks/NAME.txt pins, and lies in the cache (`~/.cache/kvik/venv/NAME-HASH`)
like those of the build, outside of any checkout. kvik is not in it. `make lock` pins the packages again.
A further contender is a lock file and an entry in `CONTENDERS`.

One that lies `beside` another environment holds only what that one lacks. Its packages are printed as a
folder for `PYTHONPATH`, with which that environment's Python finds them; the environment stays as it is.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvikbuild.envs import base_env, packages_of
from kvikbuild.stage import Context, Stage, run_stages

LIMIT = 1800.0  # seconds


@dataclass(frozen=True)
class Contender:
    """A system, and a program that shows that its environment works; it prints a version. `beside`: the
    environment whose Python finds the packages of this one."""

    about: str
    check: str
    beside: str | None = None


CONTENDERS = {
    "nixl": Contender(
        "NVIDIA's transfer library, with UCX",
        """
import os
from importlib.metadata import version
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("check", nixl_agent_config(backends=["UCX"]))
assert agent.get_agent_metadata()
print("NIXL", version("nixl"), flush=True)
os._exit(0)  # a process that has used UCX in this version dies in its destructors, after the end of Python
""",
    ),
    "nixl-in-vllm": Contender(
        "the same beside vLLM's environment, for vLLM's own connector",
        """
import os
from importlib.metadata import version
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config
agent = NixlWrapper("check", nixl_agent_config(backends=["UCX"]))
assert agent.get_agent_metadata()
print("NIXL", version("nixl"), "in vLLM", version("vllm"), flush=True)
os._exit(0)  # as above
""",
        beside="vllm",
    ),
    "mooncake": Contender(
        "Mooncake's transfer engine",
        """
from importlib.metadata import version
from mooncake.engine import TransferEngine
assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
print("Mooncake", version("mooncake-transfer-engine-non-cuda"))
""",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Make what is named; returns the exit status."""
    if not arguments:
        for name, contender in CONTENDERS.items():
            print(f"{name:<10} {contender.about}")
        return 0
    unknown = [name for name in arguments if name not in CONTENDERS]
    if unknown:
        print(f"no such contender: {' '.join(unknown)}; there are {', '.join(CONTENDERS)}", file=sys.stderr)
        return 2
    made: dict[str, Path] = {}
    status = run_stages([Stage(name, _maker(name, made), limit=LIMIT) for name in arguments])
    for name, place in made.items():
        print(f"{name}: {place}")
    return status


def _maker(name: str, made: dict[str, Path]) -> Callable[[Context], None]:
    """A stage that makes one environment, and runs its check."""

    def make(context: Context) -> None:
        contender, env = CONTENDERS[name], base_env(context, name)
        python = env / "bin" / "python"
        if contender.beside is None:
            context.run([python, "-c", contender.check])
            made[name] = python
            return
        python = base_env(context, contender.beside) / "bin" / "python"
        packages = packages_of(env)
        context.run([python, "-c", contender.check], {"PYTHONPATH": str(packages)})
        made[name] = packages

    return make


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
