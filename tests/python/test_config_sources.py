"""Which value counts, seen from outside: processes with variables and files, and what is said of bad ones."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvik
from kvik.config import CONNECTOR, ENGINE, ENTRIES, ROUTER, settings, values
from kvik.config.resolve import look_around
from kvik.handover.config import ConnectorConfig

SECRET = "never-shown-anywhere"  # noqa: S105 - of these tests
BOUND = 60.0
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("KVIK_", "XDG_"))}

# Starts two engines with the arguments given as JSON, moves a page between them, and prints what they used.
MOVES = """
import json, sys, kvik
options = json.loads(sys.argv[1])
with kvik.Engine(**options) as here, kvik.Engine(**options) as there:
    layout = kvik.Layout(1, 4096)
    source, target = (engine.allocate(4096).pages(layout, [0]) for engine in (there, here))
    ticket = there.grant(source).ticket
    # Before anything moves: a report says how many channels had joined by its end, which may be fewer.
    mechanism = here.explain(ticket)["mechanism"]
    report = here.read(target, ticket).wait()
    print(json.dumps({"name": here.name, "host": here.addresses[0].rpartition(":")[0], "mechanism": mechanism,
                      "checks": report.checks}))
"""


def python(code: str, *args: str, env: Mapping[str, str], cwd: Path | None = None) -> Any:
    """Run code in a process of its own and return the JSON that it prints."""
    done = run([sys.executable, "-c", code, *args], env, cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command(*args: str, env: Mapping[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `kvik`, wherever the tests' Python has it."""
    return run([sys.executable, "-m", "kvik.cli", *args], env, cwd)


def run(argv: list[str], env: Mapping[str, str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    full = {**BARE, "HOME": "/nonexistent", **env}
    return subprocess.run(
        argv, env=full, cwd=cwd, capture_output=True, text=True, timeout=BOUND, check=False
    )  # fmt: skip


def written(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "kvik.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def problems(env: Mapping[str, str]) -> str:
    """What an engine says of this environment."""
    with pytest.raises(kvik.InvalidArgument) as told:
        values(ENGINE, {}, look_around(env))
    return str(told.value)


# Precedence


def test_an_engine_takes_file_variable_and_argument_in_this_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[engine]\nname = "file"\ntransport = "tcp"\nchannels = 2\nlisten = "127.0.0.2:0"\nverify = "off"\n',
    )
    env = {"KVIK_CONFIG": path}
    moved = python(MOVES, "{}", env=env)
    assert (moved["name"], moved["host"], moved["mechanism"]) == ("file", "127.0.0.2", "2 channels")
    assert "page_checksum" not in moved["checks"]
    env |= {"KVIK_CHANNELS": "3", "KVIK_NAME": "variable", "KVIK_VERIFY": "full"}
    moved = python(MOVES, "{}", env=env)
    assert (moved["name"], moved["host"], moved["mechanism"]) == ("variable", "127.0.0.2", "3 channels")
    assert "page_checksum" in moved["checks"]
    moved = python(MOVES, '{"channels": 1, "name": null}', env=env)
    assert (moved["name"], moved["mechanism"]) == ("variable", "1 channel")
    assert python(MOVES, "{}", env={"KVIK_TRANSPORT": "tcp"})["mechanism"] == "4 channels"


def test_the_secret_of_a_variable_and_of_a_file_admits(tmp_path: Path) -> None:
    anywhere = "import kvik; kvik.Engine('0.0.0.0:0').close(); print('true')"
    assert python(anywhere, env={"KVIK_SECRET": SECRET})
    assert python(anywhere, env={"KVIK_CONFIG": written(tmp_path, f'[engine]\nsecret = "{SECRET}"\n')})
    done = run([sys.executable, "-c", anywhere], {}, None)
    assert done.returncode == 1
    assert "SecretRequired" in done.stderr


def test_the_connector_takes_extra_config_before_variable_before_file(tmp_path: Path) -> None:
    path = written(
        tmp_path, "[connector]\nexpiry = 60\npark_after = 3\n[engine]\nchannels = 8\ndeadline = 9\n"
    )
    env = {"KVIK_CONFIG": path, "KVIK_CONNECTOR_EXPIRY": "50", "KVIK_DEADLINE": "7", "KVIK_SECRET": SECRET}
    made = ConnectorConfig.from_extra({"expiry": 40, "channels": None}, env)
    assert (made.expiry, made.park_after, made.channels, made.deadline) == (40.0, 3.0, 8, 7.0)
    assert ConnectorConfig.from_extra({}, env).expiry == 50.0
    assert made.secret == SECRET
    assert SECRET not in repr(made)
    with pytest.raises(kvik.InvalidArgument, match="max_expiry 600 is below expiry 700"):
        ConnectorConfig.from_extra({}, {"KVIK_CONNECTOR_EXPIRY": "700"})


def test_the_router_takes_flag_before_variable_before_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[router]\nprefill = "http://127.0.0.1:1"\nport = 1\nhost = "127.0.0.3"\n')
    env = {"KVIK_CONFIG": path, "KVIK_ROUTER_DECODE": "http://127.0.0.1:2,http://127.0.0.1:3"}
    env |= {"KVIK_ROUTER_PORT": "2", "KVIK_ROUTER_HOST": "127.0.0.2"}
    argv = [sys.executable, "-m", "kvik.cli", "router", "serve", "--port", "0"]
    with subprocess.Popen(argv, env={**BARE, **env}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 0
    assert re.fullmatch(r"listening on http://127\.0\.0\.2:\d{4,5}\n", line)


def test_a_missing_required_option_names_all_ways_to_give_it() -> None:
    done = command("router", "serve", env={"KVIK_ROUTER_DECODE": "http://127.0.0.1:2"})
    assert done.returncode == 2
    assert "prefill is not set: give --prefill, the variable KVIK_ROUTER_PREFILL" in done.stderr
    assert "decode" not in done.stderr.replace("kvik-decode", "")


# Where the file is


def test_the_file_of_the_user_counts_and_that_of_the_current_directory_does_not(tmp_path: Path) -> None:
    named, home, xdg, here = (tmp_path / name for name in ("named", "home", "xdg", "here"))
    for directory in (named, home / ".config" / "kvik", xdg / "kvik", here, here / "kvik"):
        directory.mkdir(parents=True)
        for file in ("config.toml", "kvik.toml"):
            (directory / file).write_text(f'[engine]\nname = "{directory.relative_to(tmp_path)}"\n')

    def name(**env: str) -> str:
        done = command("config", "engine", "--json", env=env, cwd=here)
        told = json.loads(done.stdout)
        return str(told["options"]["engine"]["name"]["value"])

    assert name(HOME=str(home), XDG_CONFIG_HOME=str(xdg), KVIK_CONFIG=str(named / "kvik.toml")) == "named"
    assert name(HOME=str(home), XDG_CONFIG_HOME=str(xdg)) == "xdg/kvik"
    assert name(HOME=str(home)) == "home/.config/kvik"
    assert name(HOME=str(home), XDG_CONFIG_HOME="relative") == "home/.config/kvik"
    assert name(HOME=str(home), KVIK_CONFIG="") == "home/.config/kvik"
    assert name(HOME=str(home), KVIK_CONFIG=os.devnull) == ""
    assert name(HOME="") == ""


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    def told(path: Path) -> str:
        text = problems({"KVIK_CONFIG": str(path)})
        assert str(path) in text
        return text

    assert "No such file" in told(tmp_path / "missing.toml")
    assert re.search("no regular file|directory", told(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in told(tmp_path / "pipe")
    for name, content, wanted in (
        ("latin", "[engine]\nname = 'é'".encode("latin-1"), "not UTF-8"),
        ("large", b"# " + b"x" * (1 << 20), "larger than 1 MiB"),
        ("cut", b"[engine\n", "not TOML.*line 1"),
        ("deep", b"x = " + b"[" * 100_000, "not TOML"),
        ("digits", b"[engine]\nchannels = " + b"9" * 5000, "not TOML"),
        ("twice", b"[engine]\nname = 'a'\nname = 'b'\n", "not TOML"),
        ("hex", b"[engine]\nchannels = 0x" + b"f" * 9000, "not a very long number"),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_bytes(content)
        assert re.search(wanted, told(path)), name


def test_a_file_that_others_can_change_or_that_shows_a_secret_is_refused(tmp_path: Path) -> None:
    for mode, text in ((0o602, "everybody can change"), (0o644, "holds a secret"), (0o660, "holds a secret")):
        path = written(tmp_path, f'[engine]\nsecret = "{SECRET}"\n', mode)
        told = problems({"KVIK_CONFIG": path})
        assert text in told
        assert "chmod" in told
        assert SECRET not in told
    for mode in (0o600, 0o400, *([0o640, 0o440] if os.geteuid() == 0 else [])):
        path = written(tmp_path, f'[engine]\nsecret = "{SECRET}"\n', mode)
        assert values(ENGINE, {}, look_around({"KVIK_CONFIG": path}))["secret"] == SECRET
        assert stat.S_IMODE(Path(path).stat().st_mode) == mode
    assert "everybody can change" in problems({"KVIK_CONFIG": written(tmp_path, "", 0o666)})
    assert values(ENGINE, {}, look_around({"KVIK_CONFIG": written(tmp_path, "", 0o644)}))


# What is unknown, and what cannot be


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVIK_CHANELS", "KVIK_CHANNELS"),
        ("KVIK_ENGINE_LISTEN", "KVIK_LISTEN"),
        ("KVIK_ROUTER_PROT", "KVIK_ROUTER_PORT"),
        ("KVIK_ROUTR_PORT", "KVIK_ROUTER_PORT"),
        ("KVIK_PORT", "KVIK_ROUTER_PORT"),
        ("KVIK_MAX_BODY", "KVIK_ROUTER_MAX_BODY"),
        ("KVIK_EMULATOR_PROT", "KVIK_EMULATOR_PORT"),
        ("KVIK_EXPIRY", "KVIK_CONNECTOR_EXPIRY"),
        ("KVIK_CONFIGS", "KVIK_CONFIG"),
        ("KVIK_SECRETS", "KVIK_SECRET"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(name: str, meant: str) -> None:
    told = problems({name: SECRET})
    assert told.startswith(f"{name}: kvik has no such variable; did you mean {meant}?")
    assert SECRET not in told


def test_an_engine_refuses_an_unknown_variable() -> None:
    done = run([sys.executable, "-c", "import kvik; kvik.Engine()"], {"KVIK_CHANELS": "4"}, None)
    assert (
        "InvalidArgument: KVIK_CHANELS: kvik has no such variable; did you mean KVIK_CHANNELS" in done.stderr
    )
    assert done.returncode == 1
    assert "kvik has no such variable: unset it" in problems({"KVIK_QQQQQQQQ": "1"})
    assert "'KVIK_\\n" in problems({"KVIK_\n": "1"})


def test_variables_of_others_are_left_alone() -> None:
    env = {
        "KVIK_TEST_ANYTHING": "1",
        "KVIK_SEED": "7",
        "KVIK_CHANNELS": "",
        "kvik_channels": "x",
        "KVIKS": "x",
        # What Kubernetes sets for the services kvik and kvik-router.
        "KVIK_SERVICE_HOST": "10.0.0.1",
        "KVIK_SERVICE_PORT": "8000",
        "KVIK_PORT": "tcp://10.0.0.1:8000",
        "KVIK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KVIK_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KVIK_ROUTER_SERVICE_PORT_HTTP": "8000",
        "KVIK_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "KVIK_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KVIK_ROUTER_PORT_8000_TCP_PORT": "8000",
        "KVIK_ROUTER_PORT_8000_TCP_PROTO": "tcp",
    }
    assert {one.source for one in settings(ENGINE, {}, look_around(env))} == {"default"}
    found = {one.option.name: one for one in settings(ROUTER, {}, look_around(env))}
    assert (found["port"].value, found["port"].source) == (8000, "default")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[engine]\n\nchanels = 4", ":3: there is no option engine.chanels; did you mean engine.channels?"),
        ("[engine]\nexpiry = 4", ":2: there is no option engine.expiry; did you mean connector.expiry?"),
        ("[connector]\nchannels = 4", "there is no option connector.channels; did you mean engine.channels?"),
        ("[engine]\nqqqq = 4", "there is no option engine.qqqq; [engine] has listen, advertise"),
        ("[engin]\nchannels = 4", ":1: there is no table engin; did you mean engine?"),
        ("[qqqq]\nchannels = 4", "there is no table qqqq; the tables are cache, connector, emulator, engine"),
        ("channels = 4", ":1: there is no option channels; did you mean engine.channels?"),
        ("engine = 4", ":1: engine is a table: write [engine]"),
        ("[[engine]]\nchannels = 4", "engine is a table"),
        ("engine.chanels = 4", ":1: there is no option engine.chanels; did you mean engine.channels?"),
        ('[engine]\n"a\\nb" = 4', "there is no option 'engine.a\\nb'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, text: str, wanted: str) -> None:
    path = written(tmp_path, text)
    told = problems({"KVIK_CONFIG": path})
    assert wanted in told
    assert told.startswith(path)


WRONG: list[tuple[str, str, str, str]] = [
    ("KVIK_CHANNELS", "four", '"four"', "channels is a whole number from 1 to 64, not 'four'"),
    ("KVIK_CHANNELS", "65", "65", "channels is a whole number from 1 to 64"),
    ("KVIK_CHANNELS", "4.0", "4.0", "channels is a whole number from 1 to 64"),
    ("KVIK_CHANNELS", "true", "true", "channels is a whole number from 1 to 64"),
    ("KVIK_DEADLINE", "0", "0", "deadline is a number of seconds above 0 and at most 86400"),
    ("KVIK_DEADLINE", "inf", "inf", "deadline is a number of seconds"),
    ("KVIK_MEMORY_CAP", "1kB", '"1kB"', "memory_cap is a number of bytes"),
    ("KVIK_TRANSPORT", "rdma", '"rdma"', 'transport is "auto", "tcp", "local" or "nics", not \'rdma\''),
    ("KVIK_LISTEN", "10.0.0.5", '"10.0.0.5"', "listen is HOST:PORT or [IPV6]:PORT, or several of them"),
    ("KVIK_CPUS", "a", '["0"]', "cpus is CPU numbers"),
    ("KVIK_NICS", "n" * 257, '["efa"]', "nics is the name of NICs of 1 to 256 bytes, not "),
    ("KVIK_NUMA_NODE", "-1", "-1", "numa_node is a whole number from 0"),
    ("KVIK_NAME", "n" * 101, '"' + "n" * 101 + '"', "name is text of 1 to 100 bytes"),
    (
        "KVIK_SECRET",
        "shhh!!",
        '"shhh!!"',
        "secret is text of at least 8 bytes; this is not (and is not shown)",
    ),
]


@pytest.mark.parametrize(("variable", "text", "toml", "wanted"), WRONG)
def test_a_value_that_cannot_be_is_said_with_its_source(
    tmp_path: Path, variable: str, text: str, toml: str, wanted: str
) -> None:
    option = next(option for option in ENGINE.options if option.variable == variable)
    path = written(tmp_path, f"# a comment\n[engine]\n{option.name} = {toml}\n")
    for env, source in (({variable: text}, variable), ({"KVIK_CONFIG": path}, f"{path}:3")):
        told = problems(env)
        assert told.startswith(f"{source}: {wanted}")
        assert "shhh" not in told
        assert len(told) < len(source) + 200


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "[engine]\nchanels = 1\ndeadline = 0\n[router]\nport = 'x'\n")
    told = problems({"KVIK_CONFIG": path, "KVIK_NAMES": "x", "KVIK_CHANNELS": "0"}).splitlines()
    assert len(told) == 5
    assert sum(line.startswith(path) for line in told) == 3


# The command, and what it must not do


def test_the_command_shows_values_and_sources(tmp_path: Path) -> None:
    path = written(
        tmp_path, f'[engine]\nchannels = 8\nsecret = "{SECRET}"\n[router]\nprefill = "http://a:1"\n'
    )
    env = {"KVIK_CONFIG": path, "KVIK_DEADLINE": "20"}
    shown = command("config", env=env)
    assert shown.returncode == 0, shown.stderr
    rows = {tuple(re.split(r"\s*│\s*", line)[1:4]) for line in shown.stdout.splitlines()}
    wanted = {
        ("channels", "8", "kvik.toml:2"),
        ("deadline", "20 s", "KVIK_DEADLINE"),
        ("secret", "(set, not shown)", "kvik.toml:3"),
        ("expiry", "120 s", "default"),
        ("prefill", "http://a:1", "kvik.toml:5"),
        ("decode", "(required)", "not set"),
    }
    assert wanted <= rows
    told = json.loads(command("config", "--json", env=env).stdout)
    assert told["file"] == path
    assert set(told["options"]) == {entry.name for entry in ENTRIES}
    assert told["options"]["engine"]["channels"] == {
        "value": 8, "source": f"{path}:2", "variable": "KVIK_CHANNELS", "key": "engine.channels", "unit": "",
    }  # fmt: skip
    verbose = command("config", "--verbose", "engine", env=env)
    about = " ".join(re.sub("[│─├┼┤]", " ", verbose.stdout).split())
    for option in ENGINE.options:
        assert option.help.split()[0] in about
        assert option.variable in about
    assert "Router" not in about
    for done in (shown, verbose, command("config", "connector", "--json", env=env)):
        assert SECRET not in done.stdout + done.stderr
        assert max(len(line) for line in done.stdout.splitlines()) <= 80 or done.stdout.startswith("{")


def test_the_command_ends_with_2_when_something_is_wrong(tmp_path: Path) -> None:
    for args in (("config",), ("config", "router"), ("config", "--json")):
        done = command(*args, env={"KVIK_CHANELS": SECRET})
        assert (done.returncode, done.stdout) == (2, "")
        assert "did you mean KVIK_CHANNELS" in done.stderr
        assert SECRET not in done.stderr
    right = written(tmp_path, "[engine]\nchannels = 8\n")
    assert command("config", "check", right, env={}).stdout == f"{right}: 1 option, nothing wrong\n"
    wrong = written(tmp_path, "[engine]\nchannels = 80\n")
    done = command("config", "check", wrong, env={})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{wrong}:2: channels is a whole number" in done.stderr
    assert command("config", "check", str(tmp_path / "none"), env={}).returncode == 2


def test_a_file_is_checked_with_the_variables_that_are_set(tmp_path: Path) -> None:
    """Values that are right one by one need not be so together, and some may be of variables."""
    path = written(tmp_path, "[connector]\nexpiry = 400\n")
    assert command("config", "check", path, env={}).returncode == 0
    apart = "connector: max_expiry 300 is below expiry 400"
    for env, said in (
        ({"KVIK_CHANELS": "8"}, "did you mean KVIK_CHANNELS"),
        ({"KVIK_CHANNELS": "80"}, "KVIK_CHANNELS: channels is a whole number"),
        ({"KVIK_CONNECTOR_MAX_EXPIRY": "300"}, apart),
        ({"KVIK_CONFIG": "/nonexistent", "KVIK_CONNECTOR_MAX_EXPIRY": "300"}, apart),
    ):
        done = command("config", "check", path, env=env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count(said) == 1, done.stderr
    apart = written(tmp_path, "[connector]\nexpiry = 700\n")
    assert command("config", "check", apart, env={}).returncode == 2
    assert command("config", "check", apart, env={"KVIK_CONNECTOR_MAX_EXPIRY": "700"}).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        "bench transfer --listen 127.0.0.1:0",
        "emulator serve",
        "router serve --prefill http://a:1 --decode http://a:2",
        "selftest",
        "store doctor",
        "store serve",
        "store stat",
        "trace replay --listen 127.0.0.1:0",
    ],
)
def test_a_command_that_makes_an_engine_ends_with_2_where_a_variable_is_wrong(words: str) -> None:
    done = command(*words.split(), env={"KVIK_CHANELS": "4"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: KVIK_CHANELS: kvik has no such variable" in done.stderr


def test_nothing_is_loaded_before_it_is_needed() -> None:
    code = """
import json, sys, kvik
before = [name for name in sys.modules if name.startswith(("kvik.config", "tomllib", "click", "rich"))]
kvik.Engine().close()
after = [name for name in ("tomllib", "click", "rich", "kvik.config.cli") if name in sys.modules]
print(json.dumps([before, after, "kvik.config" in sys.modules]))
"""
    assert python(code, env={}) == [[], [], True]


def test_each_construction_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monkeypatch.setenv("KVIK_NAME", name)
        with kvik.Engine() as engine:
            assert engine.name == name
    monkeypatch.setenv("KVIK_NAME", "third")
    with kvik.Engine(name="given") as engine:
        assert engine.name == "given"


def test_a_setting_does_not_show_its_value() -> None:
    found = settings(CONNECTOR, {}, look_around({"KVIK_SECRET": SECRET}))
    assert SECRET not in repr(found)
    assert SECRET not in repr(look_around({"KVIK_SECRET": SECRET}))
