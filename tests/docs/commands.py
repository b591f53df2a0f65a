"""Commands in blocks that cannot run here: that what they call exists, with these options and values."""

import json
import re
import shlex
from collections.abc import Iterator

import click

from kvik.cli import main
from kvik.handover.config import ConnectorConfig
from kvik.serving_cache.config import CacheConfig
from tests.docs.pages import ROOT, Block

CONNECTOR = {
    "kv_connector": {"KvikConnector"},
    "kv_connector_module_path": {"kvik.vllm"},
    "kv_role": {"kv_producer", "kv_consumer", "kv_both"},
    "kv_load_failure_policy": {"recompute", "fail"},
}
TRANSFER_OPTION = "--kv-transfer-config"
_REDIRECTION = re.compile(r"\d?[<>]{1,2}.*")
_REDIRECTION_TO = re.compile(r"\d?[<>]{1,2}")  # what it leads to is the next word
_SEPARATORS = {"|", "||", "&", "&&", ";", "\\\n"}


def command_lines(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell text, as words. Quotes and backslashes may join several lines."""
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on in the next line
            pending += "\n"
            continue
        pending = ""
        command: list[str] = []
        for before, word in zip(["", *words], words, strict=False):
            if _REDIRECTION.fullmatch(word) or _REDIRECTION_TO.fullmatch(before):
                continue
            if word in _SEPARATORS:
                yield command
                command = []
            else:
                command.append(word)
        yield command
    if pending.strip():
        raise ValueError(f"a quotation has no end: {pending.strip()[:80]}")


def check(block: Block) -> None:
    """Check each command that we know; ValueError says what is wrong."""
    for words in command_lines(block.text):
        for index, word in enumerate(words):
            if (
                word == "kvik"
                and index + 1 < len(words)
                and words[index - 1] not in ("install", "upgrade", "-p", "name")
            ):
                check_kvik(words[index + 1 :])
            elif word == TRANSFER_OPTION:
                check_transfer_config(words[index + 1])
        if words[:1] == ["make"]:
            check_make([word for word in words[1:] if "=" not in word])


def check_kvik(arguments: list[str]) -> None:
    """Parse as `kvik` would, without doing anything."""
    command: click.Command = main
    context = click.Context(main, info_name="kvik")
    rest = list(arguments)
    try:
        while isinstance(command, click.Group):
            if not rest or rest[0].startswith("-"):
                command.make_parser(context).parse_args(rest)
                return
            name, found, rest = command.resolve_command(context, rest)
            if found is None:
                raise ValueError(f"`kvik {' '.join(arguments)}`: no command {name}")
            command, context = found, click.Context(found, parent=context, info_name=name)
        if "--help" not in rest:
            command.parse_args(context, rest)
    except click.ClickException as error:
        raise ValueError(f"`kvik {' '.join(arguments)}`: {error.format_message()}") from error


def check_transfer_config(text: str) -> None:
    """vLLM's option: our keys have values that exist, and our connector takes its own options."""
    config = json.loads(text)
    for key, allowed in CONNECTOR.items():
        if config.get(key) not in allowed:
            raise ValueError(f"{TRANSFER_OPTION}: {key} is {config.get(key)!r}, not one of {sorted(allowed)}")
    unknown = set(config) - set(CONNECTOR) - {"kv_connector_extra_config", "engine_id", "kv_buffer_device"}
    if unknown:
        raise ValueError(f"{TRANSFER_OPTION}: {sorted(unknown)} are no keys that this project uses")
    extra, env = dict(config.get("kv_connector_extra_config", {})), {"KVIK_CONFIG": "/dev/null"}
    CacheConfig.from_extra(extra.pop("store", None), "store", env)
    ConnectorConfig.from_extra(extra, env=env)


def check_make(targets: list[str]) -> None:
    """That the targets exist."""
    text = (ROOT / "Makefile").read_text()
    for target in targets:
        if re.search(rf"^{re.escape(target)}:", text, re.MULTILINE) is None:
            raise ValueError(f"make has no target {target!r}")
