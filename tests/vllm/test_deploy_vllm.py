"""The manifests for vLLM engines, given to vLLM's own command line and to kvik's connector."""

import json

import pytest

from kvik.handover.config import ConnectorConfig
from tests.python.manifests import workloads


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_arguments(role: str, kv_role: str) -> None:
    """vLLM takes every argument; the ports are those that the container declares."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    workload = workloads("vllm")[f"kvik-{role}"]
    words = workload.arguments({"POD_IP": "10.1.2.3"})
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(parsed)
    assert (parsed.model_tag, parsed.host, parsed.port) == (
        "/models/model",
        "10.1.2.3",
        workload.ports["http"],
    )
    transfer = parsed.kv_transfer_config
    transfer = json.loads(transfer) if isinstance(transfer, str) else transfer
    assert (transfer.kv_connector, transfer.kv_connector_module_path) == ("KvikConnector", "kvik.vllm")
    assert (transfer.kv_role, transfer.kv_load_failure_policy) == (kv_role, "recompute")
    config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
    assert config.listen == (f"10.1.2.3:{workload.ports['kvik']}",)
