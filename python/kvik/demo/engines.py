"""The command lines: a vLLM server on CPU, alone or with kvik's connector, and kvik's router."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvik.roles.ports import LOOPBACK
from kvik.roles.processes import HttpServer

MODEL = "tiny"
BLOCK_TOKENS = 128  # the CPU backend's own choice
Role = Literal["kv_producer", "kv_consumer", "kv_both"]


@dataclass(frozen=True)
class Connector:
    """How an engine loads kvik's connector."""

    role: Role
    report_file: Path | None = None
    module: str = "kvik.vllm"
    cls: str = "KvikConnector"
    extra: Mapping[str, object] = field(default_factory=dict)

    def config(self) -> str:
        """The JSON of `--kv-transfer-config`."""
        extra: dict[str, object] = {"listen": "127.0.0.1:0", **self.extra}
        if self.report_file is not None:
            extra["report_file"] = str(self.report_file)
        return json.dumps({
            "kv_connector": self.cls,
            "kv_connector_module_path": self.module,
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        })  # fmt: skip


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM server on CPU."""

    name: str
    connector: Connector | None = None
    tensor_parallel: int = 1
    prefix_caching: bool = True
    block_tokens: int = BLOCK_TOKENS
    max_sequences: int = 16
    kv_gib: int = 1
    host: str = LOOPBACK
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, model: Path, port: int) -> list[str]:
        """The server's command line."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", MODEL, "--seed", "0"]
        command += ["--host", self.host, "--port", str(port)]
        # float32: sums differ least between batch sizes, and no CPU lacks it. Eager: nothing to compile at
        # the start.
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
        command += ["--max-num-seqs", str(self.max_sequences), "--block-size", str(self.block_tokens)]
        command += ["--tensor-parallel-size", str(self.tensor_parallel)]
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        if self.connector is not None:
            command += ["--kv-transfer-config", self.connector.config()]
        return [*command, *self.arguments]

    def environment(self) -> dict[str, str]:
        """What the server's environment gets on top."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            # One thread a worker, placed by the kernel: several engines share few cores here, and one
            # thread's sums are always taken in the same order.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": self.host,
            "PYTHONUNBUFFERED": "1",
            **self.env,
        }

    def start(self, model: Path, port: int, logs: Path) -> HttpServer:
        """Start it; it is up once `wait_ready` returns."""
        return HttpServer(
            self.name, self.command(model, port), port, logs / f"{self.name}.log", self.environment(),
            host=self.host,
        )  # fmt: skip


def start_router(
    prefill: Sequence[str], decode: Sequence[str], port: int, logs: Path, mode: str = "pull"
) -> HttpServer:
    """Start kvik's router in front of these engines (URLs), with this `--transfer-mode`."""
    command = [
        sys.executable,
        "-m",
        "kvik.cli",
        "router",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--transfer-mode",
        mode,
    ]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    return HttpServer("router", command, port, logs / "router.log")
