"""The schema of the options, beside what it describes: the engine, the connector, the router, the pages."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest

import kvik
from kvik import _native
from kvik import router as router_command
from kvik.config import CONNECTOR, EMULATOR, ENGINE, ENTRIES, ROUTER, Entry, Option, flags, page
from kvik.config.file import load
from kvik.config.kinds import (
    Addresses,
    ByRank,
    Choice,
    Cpus,
    Flag,
    Kind,
    Rate,
    Seconds,
    Secret,
    Size,
    Text,
    Texts,
    Urls,
    Whole,
)
from kvik.config.schema import MOST_OPTIONS
from kvik.config.tables import all_options
from kvik.emulator import cli as emulator
from kvik.emulator.options import Options as EmulatorOptions
from kvik.handover.config import ConnectorConfig

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = list(all_options().values())
by_key = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)


def refused(read: Callable[[Any], object], given: object) -> bool:
    """Whether a kind refuses this in the way that those who ask it expect."""
    try:
        read(given)
    except ValueError:
        return True
    return False


# The tables


def test_no_entry_point_takes_more_than_twenty() -> None:
    for entry in ENTRIES:
        names = [option.name for option in entry.options]
        assert 0 < len(names) <= MOST_OPTIONS == 20, entry.name
        assert len(set(names)) == len(names), entry.name


def test_an_option_has_one_variable_and_one_key() -> None:
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)
    for entry in ENTRIES:
        for option in entry.options:
            assert all_options()[option.key] is option, f"{option.key} is defined twice"
    assert (ENGINE["secret"].variable, ENGINE["secret"].key) == ("KVIK_SECRET", "engine.secret")
    assert (ROUTER["port"].variable, ROUTER["port"].key) == ("KVIK_ROUTER_PORT", "router.port")


@by_key
def test_an_option_says_what_it_is_and_why(option: Option) -> None:
    for text in (option.help, option.reason):
        assert re.fullmatch(r"[A-Z0-9].*\.", text), text
    assert option.help != option.reason
    assert isinstance(option.kind, Seconds) == (option.kind.unit == "seconds")
    assert option.default is None or not option.required


@by_key
def test_a_default_is_a_value_that_the_option_takes(option: Option) -> None:
    if option.default in (None, ""):
        assert option.shown(option.default)
    else:
        assert option.kind.from_text(option.kind.to_text(option.default)) == option.default
        assert option.kind.from_value(option.default) == option.default


# The engine


def test_the_signature_of_the_engine_is_the_schema() -> None:
    parameters = inspect.signature(kvik.Engine).parameters
    assert list(parameters) == [option.name for option in ENGINE.options]
    for option in ENGINE.options:
        told = parameters[option.name].default
        assert told == option.default or option.kind.from_value(told) == option.default, option.name
        assert re.search(rf"^([\w, ]*, )?{option.name}(, \w+)*: ", str(kvik.Engine.__doc__), re.MULTILINE)


def test_the_defaults_of_the_native_side_are_those_of_the_schema() -> None:
    native = _native.engine_defaults()
    assert list(native) == [option.name for option in ENGINE.options]
    for option in ENGINE.options:
        text = native[option.name]
        assert (option.kind.from_text(text) if text else option.default or None) == (option.default or None)


BOUNDS: list[tuple[str, Any, Any]] = [
    ("channels", 1, 0),
    ("channels", 64, 65),
    ("io_threads", 1, 0),
    ("io_threads", 64, 65),
    ("nic_threads", 1, 0),
    ("nic_threads", 32, 33),
    ("deadline", 86_400.0, 86_401.0),
    ("deadline", 0.001, 0.0),
    ("memory_cap", 1 << 20, (1 << 20) - 1),
    ("window", 64 << 10, (64 << 10) - 1),
    ("name", "n" * 100, "n" * 101),
    ("secret", "8 bytes.", "7 bytes"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), BOUNDS)
def test_the_bounds_of_the_native_side_are_those_of_the_schema(name: str, right: Any, wrong: Any) -> None:
    kind = ENGINE[name].kind
    assert kind.from_value(right) == right
    kvik.Engine(**{name: right}).close()
    assert refused(kind.from_value, wrong)
    with pytest.raises(kvik.InvalidArgument):
        kvik.Engine(**{name: wrong})


def test_an_argument_of_the_wrong_type_is_named() -> None:
    for name in ("channels", "deadline", "name", "cpus"):
        with pytest.raises(TypeError, match=f"argument '{name}': "):
            kvik.Engine(**{name: object()})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument 'listen'"):
        kvik.Engine(4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="secret takes a str or bytes"):
        kvik.Engine(secret=4)  # type: ignore[arg-type]


# The connector and the router


def test_the_connector_takes_its_table() -> None:
    assert {field.name: field.default for field in fields(ConnectorConfig)} == CONNECTOR.defaults()
    assert ConnectorConfig.from_extra({}, env={}) == ConnectorConfig()
    told = ConnectorConfig(secret="a long secret", advertise=("h",), cpus=(0,), numa_node=0, tls="/t")  # noqa: S106
    told = replace(told, nics="efa")
    elsewhere = ("window", "nic_library", "nic_threads")
    own = [option.name for option in ENGINE.options if option.name not in elsewhere]
    assert list(told.engine_options("n", 0)) == own


def test_the_router_takes_its_table() -> None:
    names = {option.name for option in ROUTER.options}
    assert {field.name for field in fields(router_command.RouterOptions)} == names
    serve = router_command.serve
    assert {parameter.name for parameter in serve.params} == names
    told = serve.get_help(click.Context(serve))
    for option in ROUTER.options:
        assert option.flag in told
        assert option.variable in told
        assert option.required or f"default {option.shown(option.default)}" in " ".join(told.split())


def test_the_emulator_takes_its_table() -> None:
    names = {option.name for option in EMULATOR.options}
    assert {field.name for field in fields(EmulatorOptions)} == names
    assert {parameter.name for parameter in emulator.serve.params} == names
    assert EMULATOR["listen"] is ENGINE["listen"]
    assert EMULATOR["report_file"] is CONNECTOR["report_file"]


def test_flags_of_every_kind() -> None:
    kinds: dict[str, tuple[Kind, list[str], Any]] = {
        "flag": (Flag(), ["--no-flag"], False),
        "whole": (Whole(0, 9), ["--whole", "9"], 9),
        "hosts": (Addresses(bare=True), ["--hosts", "a,b:1", "--hosts", "::1"], ("a", "b:1", "::1")),
        "cpus": (Cpus(), ["--cpus", "0,2-4"], (0, 2, 3, 4)),
        "size": (Size(), ["--size", "1kB"], 1000),
        "specs": (Texts("spec"), ["--specs", "a:b=1,c=2", "--specs", "d;e"], ("a:b=1,c=2", "d", "e")),
    }
    table = Entry(
        name="engine", title="", where="",
        options=tuple(
            Option(name=name, section="test", kind=kind, default=None, help="H.", reason="R.")
            for name, (kind, _, _) in kinds.items()
        ),
    )  # fmt: skip

    @click.command()
    @flags.options(table)
    def command(**given: object) -> object:
        return flags.chosen(table, given)

    argv = [text for _, texts, _ in kinds.values() for text in texts]
    wanted = {name: value for name, (_, _, value) in kinds.items()}
    assert command.main(argv, standalone_mode=False) == wanted
    assert set(command.main([], standalone_mode=False).values()) == {None}
    with pytest.raises(click.BadParameter, match="whole is a whole number from 0 to 9, not '10'"):
        command.main(["--whole", "10"], standalone_mode=False)


# Kinds: what each reads, and what it does not

READS: list[tuple[Kind, str, Any]] = [
    (Flag(), "true", True),
    (Flag(), "Off", False),
    (Whole(-3, 70), " 64 ", 64),
    (Seconds(), "1.5", 1.5),
    (Seconds(), "2", 2.0),
    (Rate(("measured", "off")), "12000.5", 12000.5),
    (Rate(("measured", "off")), " off ", "off"),
    (Size(), "16KiB", 16 << 10),
    (Size(), "4096", 4096),
    (Choice(("auto", "tcp")), "tcp", "tcp"),
    (Text(), "any text, with commas", "any text, with commas"),
    (Secret(8), " spaces are part of it ", " spaces are part of it "),
    (Addresses(), "10.0.0.5:7400", ("10.0.0.5:7400",)),
    (Addresses(), "[::1]:0, host.example:1", ("[::1]:0", "host.example:1")),
    (Addresses(bare=True), "host,::1,[fe80::1],10.1.1.1:5", ("host", "::1", "[fe80::1]", "10.1.1.1:5")),
    (Urls(), "http://a:1,http://b:2", ("http://a:1", "http://b:2")),
    (Cpus(), "0,4-6", (0, 4, 5, 6)),
    (Texts("spec"), "slow:after=3,times=1;dead", ("slow:after=3,times=1", "dead")),
]
REFUSES: list[tuple[Kind, str]] = [
    (Flag(), "maybe"),
    (Flag(), ""),
    (Whole(1, 64), "65"),
    (Whole(1, 64), "0"),
    (Whole(1, 64), "4.0"),
    (Whole(1, 64), "four"),
    (Whole(1, 64), "9" * 5000),
    (Seconds(), "0"),
    (Seconds(), "-1"),
    (Seconds(), "nan"),
    (Seconds(), "inf"),
    (Seconds(), "86400.5"),
    (Seconds(), "30s"),
    (Rate(("off",)), "measured"),
    (Rate(("off",)), "0"),
    (Rate(("off",)), "inf"),
    (Size(1 << 20), "4096"),
    (Size(), "12 parsecs"),
    (Size(), "0"),
    (Choice(("auto", "tcp")), "rdma"),
    (Text(3), "four"),
    (Text(), ""),
    (Text(), "nul\0"),
    (Secret(8), "short"),
    (Addresses(), "10.0.0.5"),
    (Addresses(), "10.0.0.5:65536"),
    (Addresses(), "::1:0:"),
    (Addresses(), "a:1,,b:2"),
    (Addresses(), "\udcff:1"),
    (Addresses(bare=True), "two words"),
    (Addresses(bare=True), "http://host"),
    (Urls(), "ftp://host"),
    (Urls(), "host:80"),
    (Urls(), "http://\udcff"),
    (Texts("spec"), "dead;"),
    (Texts("spec"), "\udcff"),
    (Cpus(), "3-1"),
    (Cpus(), "-1"),
    (Cpus(), "0-99999999"),
]


@pytest.mark.parametrize(("kind", "text", "value"), READS)
def test_a_kind_reads_text_and_writes_it_again(kind: Kind, text: str, value: Any) -> None:
    assert kind.from_text(text) == value
    assert kind.from_value(value) == value
    if not kind.secret:
        assert kind.from_text(kind.to_text(value)) == value


def test_a_value_for_each_rank_is_read_by_the_kind_of_one() -> None:
    kind = ByRank(Text(3))
    for given, wanted in (
        ("all", "all"),
        (["a", "b"], {0: "a", 1: "b"}),
        ({"3": "d", "12": "m"}, {3: "d", 12: "m"}),
    ):
        assert kind.from_value(given) == wanted
    assert kind.from_text("all") == "all"
    for wrong in ("four", ["a", "four"], {"0": 1}, {"zero": "a"}, [], {}, None, 4):
        assert refused(kind.from_value, wrong)
    assert {entry.name: list(entry.direct) for entry in ENTRIES if entry.direct} == {"connector": ["nics"]}


@pytest.mark.parametrize(("kind", "text"), REFUSES)
def test_a_kind_refuses_text(kind: Kind, text: str) -> None:
    assert refused(kind.from_text, text)


@pytest.mark.parametrize("kind", {type(kind): kind for kind, _, _ in READS}.values(), ids=repr)
def test_a_kind_refuses_values_of_other_types(kind: Kind) -> None:
    for value in (None, {}, [], [None], [[]], object(), 1.5j, float("nan"), -4, 1 << 70, 1 << 2000):
        assert refused(kind.from_value, value)
    assert kind.accepts


# The pages


def test_the_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert committed == page.page(), "run: python -m kvik.config.page > docs/reference/configuration.md"
    for option in OPTIONS:
        for part in (option.variable, option.name, option.help, option.reason, option.kind.accepts):
            assert part in " ".join(committed.split())


def test_the_example_of_the_docs_is_right(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 1
    path = tmp_path / "kvik.toml"
    path.write_text(examples[0])
    file = load(path, all_options())
    assert file.problems == []
    assert file.values["engine.channels"] == 8
    assert set(file.values) == {
        f"{section}.{key}"
        for section, body in re.findall(r"\[(\w+)\]\n(.*?)(?=\n\[|\Z)", examples[0], re.DOTALL)
        for key in re.findall(r"^(\w+) =", body, re.MULTILINE)
    }
