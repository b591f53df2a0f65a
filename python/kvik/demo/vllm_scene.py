"""The demo with real vLLM servers on CPU and a tiny model with random weights."""

import importlib.util
import time
from pathlib import Path

from kvik.demo.checkpoint import FIRST_BYTE_TOKEN, KV_BYTES_PER_TOKEN, ensure_checkpoint
from kvik.demo.engines import BLOCK_TOKENS, MODEL, Connector, EngineSpec, start_router
from kvik.demo.reports import ReportReader
from kvik.demo.scene import (
    KvFacts,
    Place,
    Scene,
    SettingError,
    Settings,
    check_memory,
    report_file,
    wait_all,
)
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet

LENGTHS: tuple[int, ...] = (1, 100, 128, 129, 500, 1000, 2000, 3000)
MAX_LENGTH = 4000  # prompt and answer have to fit into the model's 4096
START_LIMIT = 300.0
RANK_GIB = 4  # of memory that one rank needs
STARTING = "starting three vLLM servers (about a minute)"


def check(settings: Settings) -> None:
    """`SettingError` for what this engine cannot show, or not on this machine."""
    if importlib.util.find_spec("vllm") is None:
        raise SettingError(
            "vLLM is not installed here. `ENGINE=vllm make demo` installs it into an environment of its own; "
            "`kvik demo` without --engine needs none"
        )
    if settings.model_shape or settings.fault:
        raise SettingError("--model-shape and --fault are for the emulator; vLLM runs its own tiny model")
    if max(settings.lengths) > MAX_LENGTH:
        raise SettingError(f"--lengths: the tiny model takes prompts of up to {MAX_LENGTH} tokens")
    ranks = settings.ranks.prefill + 2 * settings.ranks.decode
    what = f"three vLLM servers with {ranks} ranks in all"
    check_memory((ranks * RANK_GIB + 1) << 30, what, "fewer ranks (--tp), or the emulator")


def facts(_settings: Settings) -> KvFacts:
    """The KV that the tiny model has: the same in all, however many ranks share it."""
    bytes_of_block = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    return KvFacts(BLOCK_TOKENS, bytes_of_block, range(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256))


def store_act(_scene: Scene, _settings: Settings, _fleet: Fleet, _logs: Path) -> None:
    """None: the second act is played by emulators."""


def start(settings: Settings, place: Place, fleet: Fleet, logs: Path) -> Scene:
    """Start everything; `ProcessError` when something does not come up."""
    model = ensure_checkpoint()
    ranks, report = settings.ranks, report_file(logs)
    extra = {"transport": settings.transport}
    at = place.prefill_host()
    environment = place.environment()
    prefill = EngineSpec(
        "prefill", Connector("kv_producer", extra={**extra, "listen": f"{at}:0"}), ranks.prefill, host=at,
        env=environment,
    )  # fmt: skip
    decode = EngineSpec(
        "decode", Connector("kv_consumer", report, extra=extra), ranks.decode, env=environment
    )
    alone = EngineSpec("alone", tensor_parallel=ranks.decode)
    deadline = time.monotonic() + START_LIMIT
    with place.near():
        *ports, router_port = free_ports(4)
        with place.at_prefill():
            first = fleet.add(prefill.start(model, ports[0], logs))
        rest = [
            fleet.add(spec.start(model, port, logs))
            for spec, port in zip((decode, alone), ports[1:], strict=True)
        ]
        wait_all([first, *rest], deadline)
        router = fleet.add(start_router([first.url], [rest[0].url], router_port, logs))
        wait_all([router], time.monotonic() + 30)
    return Scene(
        first, rest[0], rest[1], router, ReportReader(report), facts(settings), place,
        what=f"vLLM on CPU with a tiny random-weight Llama, {KV_BYTES_PER_TOKEN >> 10} KiB of KV a token, "
        f"KV blocks of {BLOCK_TOKENS} tokens, {ranks}",
        model=MODEL,
        proof="the weights are random and wide, so KV that is wrong anywhere gives other tokens",
    )  # fmt: skip
