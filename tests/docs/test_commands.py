"""Every command of every page: run, or said to be not run, with the reason."""

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvik.roles.hosts import CannotError
from tests.conftest import note
from tests.docs import commands
from tests.docs.pages import RUNNABLE, Block, Page, pages
from tests.docs.stage import stage
from tests.docs.test_readmes import OTHERS
from tests.netns.hosts import two_hosts

CHECKED: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
SHOWN = ("text", "rust", "promql", "dockerfile", "ini", "diff", "markdown")
# The translations of the README have its very code, which test_readmes.py compares.
PAGES = [page for page in pages() if page.name not in OTHERS]
BLOCKS = [block for page in PAGES for block in page.blocks]
WITH_COMMANDS = [page for page in PAGES if any(block.runs for block in page.blocks)]


def two_hosts_exist() -> bool:
    """Whether this machine lets us make network namespaces."""
    try:
        with two_hosts():
            return True
    except CannotError:
        return False


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_of_a_page_run(page: Page, tmp_path: Path) -> None:
    """In order, each with the status that the page says."""
    if any(block.other_host for block in page.blocks) and not two_hosts_exist():
        pytest.skip("this machine gives no second host")
    with stage(tmp_path) as here:
        for block in page.blocks:
            if block.file is not None:
                here.save(block)
            elif block.runs:
                here.run(block)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_is_what_it_says(block: Block) -> None:
    """It names a language that is checked or only shown; what is not run is correct as far as can be seen."""
    known = (*RUNNABLE, *CHECKED, *SHOWN)
    assert block.language in known, f"{block.place}: a block needs a language: {', '.join(known)}"
    if block.language in CHECKED:
        CHECKED[block.language](block.text)
    elif block.language == "sh":
        done = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stderr
        commands.check(block)
    elif block.language == "python":
        compile(block.text, block.place, "exec")
    if block.not_run is not None:
        note(block.place, block.not_run)


@pytest.mark.parametrize(
    "arguments",
    [
        "rooter serve",
        "router serve --prefil http://a:1",
        "config check",
        "bench transfer --inflight x",
    ],
)
def test_a_command_that_does_not_exist_is_found(arguments: str) -> None:
    """A misspelt subcommand or option, a missing or wrong value."""
    with pytest.raises(ValueError, match="kvik"):
        commands.check_kvik(arguments.split())


@pytest.mark.parametrize(
    "wrong", [{"kv_role": "producer"}, {"kv_connector_extra_config": {"listn": "a:1"}}, {"x": 1}]
)
def test_a_wrong_connector_configuration_is_found(wrong: dict[str, object]) -> None:
    """A value that vLLM or the connector would refuse."""
    right = {
        "kv_connector": "KvikConnector",
        "kv_connector_module_path": "kvik.vllm",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
    }
    commands.check_transfer_config(json.dumps(right))
    with pytest.raises(ValueError, match=r"kv_|transfer-config"):
        commands.check_transfer_config(json.dumps(right | wrong))
