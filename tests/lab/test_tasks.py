"""Task files: read strictly, made from a study, imported back, and run by a real shell."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.errors import LabError
from kvik_lab.study import StudyError, load_study, parse_study
from kvik_lab.tasks import (
    RunOptions,
    export_tasks,
    import_plan,
    parse_task_file,
    read_task_file,
    run_task_file,
    stop_task_file,
    write_task_file,
)
from kvik_lab.tasks.exporting import DEFAULT_TEMPLATE
from kvik_lab.tasks.shell import MARK, end_marked, groups_of
from kvik_lab.tasks.state import load_state, locked, state_path
from tests.docs.pages import ROOT
from tests.lab.run.studies import wait_for
from tests.lab.test_study import ARTICLE

ARTICLE_STUDY = ROOT / "lab" / "kvik_lab" / "study" / "examples" / "efa-vs-tcp.yaml"


def definition(*tasks: dict[str, Any], **variables: str) -> str:
    """A task file's text."""
    return json.dumps({"name": "a test", "variables": variables, "tasks": tasks}, indent=1)


def task(name: str, *commands: str, **more: str) -> dict[str, Any]:
    """A task of it."""
    return {"id": name, "name": f"task {name}", "commands": list(commands), **more}


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended may stay in the list until its new parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Runs:
    """A task file in a folder of its own, and its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.state = folder, folder / "tasks.json", folder / "state"
        self.said: list[str] = []

    def write(self, *tasks: dict[str, Any], **variables: str) -> None:
        self.path.write_text(definition(*tasks, OUT=str(self.folder), **variables), encoding="utf-8")

    def run(self, **options: Any) -> dict[str, str | None]:
        self.outcome = run_task_file(self.path, RunOptions(state=self.state, **options), self.said.append)
        return self.outcome.statuses

    def lines(self, name: str = "out") -> list[str]:
        path = self.folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Nothing that a test started stays behind, also where it failed."""
    found = Runs(tmp_path)
    yield found
    with contextlib.suppress(LabError):
        stop_task_file(found.path, found.state)


def test_all_mistakes_of_a_task_file_are_named_with_their_lines() -> None:
    text = """{
  "name": "wrong",
  "descripton": "x",
  "variables": {"PORT": "8100", "LOOP": "a{{LOOP}}", "PORT": "8200", "LIST": []},
  "tasks": [
    {"id": "1", "name": "a", "commands": ["echo {{PROT}}"]},
    {"id": "1", "name": "b", "commands": ["echo {{ PORT }}", "docker ps --format '{{.ID}}'"]},
    {"id": "2", "commands": ["x"], "skip_if": "{{NONE}}"},
    {"id": "3", "name": "c", "commands": "x"},
    {"id": "4", "name": "d", "commands": [], "retry": 3}
  ]
}"""
    with pytest.raises(StudyError) as caught:
        parse_task_file(text)
    found = [(one.line, one.text, one.remedy) for one in caught.value.problems]
    wanted = [
        (3, "unknown key 'descripton'", "did you mean 'description'?"),
        (4, "'LOOP' contains itself", "write a value that does not"),
        (4, "'PORT' is given twice, first in line 4", "keep one of the two"),
        (4, "a variable that is no text", "a variable is a text"),
        (6, "{{PROT}} is no variable of the file", "did you mean 'PORT'?"),
        (7, "the id '1' is there twice, first in line 6", "give each task its own"),
        (7, "'{{ PORT }}' has blanks inside", "write {{PORT}}"),
        (8, "0 has no 'name'", "add `name: ...`"),
        (8, "{{NONE}} is no variable of the file", "variables: "),
        (9, "'commands' is the text 'x', not a list", "write [a, b]"),
        (10, "'commands' has 0 of at least 1 entries", "give at least 1"),
        (10, "unknown key 'retry'", "keys here: "),
    ]
    assert len(found) == len(wanted), "\n".join(map(str, found))
    for line, words, remedy in wanted:
        hits = [one for one in found if one[0] == line and (words in one[1] or "has no 'name'" in one[1])]
        assert any(remedy in one[2] for one in hits), (line, words, found)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"name": "a",}', 1, "a key in double quotes belongs here"),
        ('{"name": "a"\n "tasks": []}', 2, "neither a comma nor }"),
        ("{'name': 1}", 1, "a key in double quotes"),
        ('{"name": "a\n"}', 1, "control character"),
        ('{"name": "a"} x', 1, "something behind the end"),
        ('{"name"', 1, "no colon"),
        ('{"name": nul}', 1, "'n' begins no value"),
        ("[" * 200, 1, "nested too deeply"),
        ("", 1, "the text ends here"),
        ('{"name": "\\ud83d"}', 1, "half a character"),
        ('{"name": "\\u0000"}', 1, "half a character (a lone surrogate) or none"),
        (f'{{"name": {"9" * 5000}}}', 1, "a number too large"),
        (f'{{"name": {"9" * 500}}}', 1, "a number too large"),
        ('{"name": 1e999}', 1, "a number too large"),
        ("null", 1, "the file is null"),
        ("[]", 1, "the file is a list"),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_task_file(text)
    assert any(one.line == line and words in one.text for one in caught.value.problems), str(caught.value)


def test_json_is_read_as_pythons_own_reader_reads_it() -> None:
    from kvik_lab.tasks.jsonmap import read_json

    value: dict[str, Any] = {
        "a": [1, -2.5e3, True, None, 'é\n"\\/\ud83d\ude00', {}, []],
        "b": {"c": 0.1},
        "": " x ",
    }
    for text in (json.dumps(value), json.dumps(value, indent=3), json.dumps(value, ensure_ascii=True)):
        assert read_json(text).data == json.loads(text)


def test_writing_and_reading_a_task_file_gives_the_same(tmp_path: Path) -> None:
    file = parse_task_file(
        definition(task("1", "a\nb {{X}}", "é"), task("2", "c", skip_if="true"), X="'q' \"r\"")
    )
    write_task_file(file, tmp_path / "deep" / "file.json")
    assert read_task_file(tmp_path / "deep" / "file.json") == file
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "file.json"]
    assert read_task_file(tmp_path / "deep" / "file.json").digest == file.digest


def test_variables_may_name_variables() -> None:
    file = parse_task_file(definition(task("1", "{{A}}"), A="<{{B}}>", B="[{{C}}]", C="c"))
    assert file.expand(file.tasks[0].commands[0]) == "<[c]>"


def test_the_articles_plan_becomes_100_task_files_and_comes_back_as_the_same_patterns(tmp_path: Path) -> None:
    study = load_study(ARTICLE_STUDY)
    made = export_tasks(study, tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in made]
    assert [name for name in names if "/" not in name] == [f"{one}.json" for one in ARTICLE]
    consumers = [f"consumer/{one}-consumer.json" for one in ARTICLE if "-unified-" not in one]
    assert [name for name in names if "/" in name] == consumers
    assert (len(made), len(consumers)) == (100, 41)
    plan = import_plan([tmp_path])
    assert sorted(plan.patterns) == sorted(ARTICLE)
    columns = {
        "BACKEND": "backend", "PROMPT_TOKENS": "tokens", "CONCURRENCY": "concurrency", "GPU_MEMORY": "gmu",
        "BATCHED_TOKENS": "batch", "CLIENT": "client",
    }  # fmt: skip
    rows = {row.id: row for row in study.design.patterns}
    for one in plan.files:
        for variable, factor in columns.items():
            if variable in one.levels:
                assert one.levels[variable] == str(rows[one.pattern].levels[factor]), one.path
    assert plan.factors["PROMPT_TOKENS"] == tuple(map(str, study.factor("tokens").levels))
    assert plan.factors["GPU_MEMORY"] == ("0.3", "0.5", "0.8", "0.9")
    assert plan.constants["MODEL"] == "Qwen/Qwen2.5-7B-Instruct"
    assert plan.constants["PREFIX_CACHING"] == "--no-enable-prefix-caching"
    assert plan.by_part["PORT"] == {"main": "8100", "consumer": "8200"}
    assert plan.labels == ("ID",)
    assert plan.alone == ()
    assert dict(plan.alike) == {row.id: row.duplicate_of for row in rows.values() if row.duplicate_of}


def test_each_arm_gets_its_transport_and_every_command_is_shell(tmp_path: Path) -> None:
    made = {path.stem: path for path in export_tasks(load_study(ARTICLE_STUDY), tmp_path)}
    texts = {}
    for name in ("p14-unified-1k", "p14-tcp-1k", "p14-efa-1k", "p14-tcp-1k-consumer", "p14-efa-1k-consumer"):
        file = read_task_file(made[name])
        commands = [file.expand(command) for one in file.tasks for command in one.commands]
        texts[name] = "\n".join(commands)
        assert subprocess.run(["bash", "-n", "-c", texts[name]], check=False).returncode == 0, name
        assert "{{" not in texts[name]
        assert "pkill" not in texts[name]
        assert not any("\n" in command for command in commands), "a runner that takes lines can run it too"
    for part in ("", "-consumer"):
        assert "UCX_TLS=tcp,self,sm" in texts[f"p14-tcp-1k{part}"]
        assert '"backends": ["UCX"]' in texts[f"p14-tcp-1k{part}"]
        assert "NIXL_BACKEND=LIBFABRIC FI_PROVIDER=efa" in texts[f"p14-efa-1k{part}"]
        assert '"backends": ["LIBFABRIC"]' in texts[f"p14-efa-1k{part}"]
    assert "kv-transfer-config" not in texts["p14-unified-1k"]
    assert "--no-enable-prefix-caching" in texts["p14-unified-1k"]


def test_a_template_of_ones_own_is_checked_against_the_study(tmp_path: Path) -> None:
    study = parse_study(
        "study: s\nunit: {model: tiny}\nfactors:\n  mode: {levels: [a, b]}\n  fast: {levels: [false, true]}\n"
        "design:\n  kind: layered\n  id: '{mode}-{fast}'\n  layers:\n"
        "    - {name: all, patterns: [{for: mode, sweep: fast}]}\n"
    )
    template = tmp_path / "template.json"
    one: dict[str, Any] = {
        "path": "{{ID}}.json",
        "when": "mode == 'a'",
        "name": "{{ID}}",
        "variables": {"X": "@fast"},
    }
    body: dict[str, Any] = {"files": [{**one, "tasks": [task("1", "echo {{X}} {{Y}}")]}]}
    body["files"][0]["variables"]["Y"] = {"@mode": {"a": "A"}}
    body["files"][0]["variables"]["Z"] = "@speed"
    template.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(StudyError) as caught:
        export_tasks(study, tmp_path / "out", template)
    said = [one.text for one in caught.value.problems]
    assert sorted(said) == [
        "'Y' says nothing for b",
        "'Z' needs 'speed', which is no factor and no constant of 's'",
    ]
    body["files"][0]["variables"]["Y"] = {"@mode": {"a": "A", "b": "B"}}
    body["files"][0]["variables"]["Z"] = "@layer"
    template.write_text(json.dumps(body), encoding="utf-8")
    made = export_tasks(study, tmp_path / "out", template)
    assert [path.name for path in made] == ["a-false.json", "a-true.json"]
    assert read_task_file(made[1]).variables == {"X": "true", "Y": "A", "Z": "all"}
    body["files"][0]["path"] = "same.json"
    template.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(LabError, match="two task files would be called"):
        export_tasks(study, tmp_path / "out", template)
    body["files"][0]["path"] = "../out.json"
    template.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(LabError, match=r"the path '\.\./out\.json'"):
        export_tasks(study, tmp_path / "out", template)
    with pytest.raises(LabError, match="which is no factor"):
        export_tasks(study, tmp_path / "out", DEFAULT_TEMPLATE)


def test_commands_run_as_in_one_shell(runs: Runs) -> None:
    """Exports, other variables, functions and the folder last; commands may have several lines."""
    runs.write(
        task("1", "export A='x y'\nB=$'two\\nlines'", "mkdir -p {{OUT}}/sub && cd {{OUT}}/sub"),
        task("2", 'f() { echo "$1:$A"; }', "unset HOME; if true; then\n  f one > {{OUT}}/out\nfi"),
        task(
            "3",
            'f two >> {{OUT}}/out; pwd >> {{OUT}}/out; echo "$B" >> {{OUT}}/out',
            "echo ${HOME-none} >> {{OUT}}/out",
        ),
    )
    assert runs.run() == {"1": "success", "2": "success", "3": "success"}
    assert runs.lines() == ["one:x y", "two:x y", str(runs.folder / "sub"), "two", "lines", "none"]


def test_a_command_may_be_one_of_kvik(runs: Runs) -> None:
    """It refuses variables that begin with KVIK_ and are none of its options: those of a task are not."""
    runs.write(task("1", f"{sys.executable} -m kvik.cli config engine --json >> {{{{OUT}}}}/out 2>&1"))
    assert runs.run() == {"1": "success"}, runs.lines()


def test_a_run_stops_at_the_first_failure_and_resumes_there_with_its_variables(runs: Runs) -> None:
    runs.write(
        task("1", "export A=kept", "echo 1 >> {{OUT}}/out"),
        task(
            "2",
            "echo 2 >> {{OUT}}/out",
            "echo before; test -e {{OUT}}/mended || exit 7",
            "echo $A >> {{OUT}}/out",
        ),
        task("3", "echo 3 >> {{OUT}}/out"),
    )
    assert runs.run() == {"1": "success", "2": "failed", "3": None}
    assert runs.outcome.failed == "2"
    for words in (
        "2: command 2 of 3 ended with status 7",
        "before",
        f"kvik lab tasks run {runs.path}",
        "--from",
    ):
        assert words in runs.outcome.text
    (runs.folder / "mended").touch()
    assert runs.run() == {"1": "success", "2": "success", "3": "success"}
    assert runs.lines() == ["1", "2", "2", "kept", "3"]
    assert set(runs.run().values()) == {"success"}
    assert runs.lines() == ["1", "2", "2", "kept", "3"], "a third run does nothing"


def test_output_that_is_longer_than_memory_is_told_by_its_end(runs: Runs) -> None:
    """A hole of 4 TiB before its last line."""
    runs.write(task("1", "truncate -s +4T /dev/stdout; echo the end; exit 3"))
    assert runs.run() == {"1": "failed"}
    assert "its output:\n" in runs.outcome.text
    assert "the end\n" in runs.outcome.text
    runs.outcome.log.unlink()


def test_from_begins_at_a_task_and_reset_begins_anew(runs: Runs) -> None:
    runs.write(*(task(name, f"echo {name} >> {{{{OUT}}}}/out") for name in "123"))
    assert runs.run(start="2") == {"1": None, "2": "success", "3": "success"}
    assert runs.lines() == ["2", "3"]
    runs.run()
    assert runs.lines() == ["2", "3", "1"], "what was left out is done, and nothing twice"
    runs.run(start="3")
    assert runs.lines() == ["2", "3", "1", "3"]
    runs.run(reset=True)
    assert runs.lines() == ["2", "3", "1", "3", "1", "2", "3"]
    with pytest.raises(LabError, match="no task '4'; its tasks: 1, 2, 3"):
        runs.run(start="4")


def test_skip_if_counts_as_done_and_is_asked_again_when_it_did_not_hold(runs: Runs) -> None:
    runs.write(
        task("1", "echo no >> {{OUT}}/out", skip_if="test -d {{OUT}}"),
        task("2", "echo yes >> {{OUT}}/out", skip_if="test -e {{OUT}}/none"),
    )
    assert runs.run() == {"1": "skipped", "2": "success"}
    assert runs.lines() == ["yes"]


def test_two_files_with_the_same_task_ids_keep_their_states_apart(tmp_path: Path) -> None:
    one, two = Runs(tmp_path), Runs(tmp_path)
    two.path = tmp_path / "other.json"
    one.write(task("01", "echo one >> {{OUT}}/out"))
    two.write(task("01", "echo two >> {{OUT}}/out"))
    assert one.run() == two.run() == {"01": "success"}
    assert one.lines() == ["one", "two"]
    one.write(task("01", "echo changed >> {{OUT}}/out"))
    one.run()
    assert one.lines() == ["one", "two", "changed"], "a file that was changed begins anew"


def test_a_command_past_its_time_is_ended_with_all_that_it_started(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(subprocess.Popen[bytes]):
        """Its time begins when it has started all."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                wait_for(lambda: bool(runs.lines("pid")), "it has started all")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    runs.write(task("1", "sleep 1000 & echo $! > {{OUT}}/pid; wait"), task("2", "true"))
    assert runs.run(timeout_s=0.5) == {"1": "timeout", "2": None}
    assert "ran longer than 0.5 s" in runs.outcome.text
    assert not alive(runs.lines("pid")[0])
    assert runs.outcome.running == {}


def test_what_runs_in_the_background_goes_on_is_named_and_is_ended_by_its_number(runs: Runs) -> None:
    runs.write(
        task("server", "sleep 1000 & echo $! > {{OUT}}/pid"), task("after", "kill -0 $(cat {{OUT}}/pid)")
    )
    assert runs.run() == {"server": "success", "after": "success"}
    (group,) = runs.outcome.running["server"]
    assert os.getpgid(int(runs.lines("pid")[0])) == group
    result = CliRunner().invoke(cli.lab, ["tasks", "run", str(runs.path), "--state", str(runs.state)])
    stop = f"kvik lab tasks stop {runs.path} --state {runs.state}"
    assert f"still running as process group {group}; {stop} ends it" in result.output
    ended = stop_task_file(runs.path, runs.state)
    assert ended == {"server": [group]}
    assert not alive(runs.lines("pid")[0])
    assert stop_task_file(runs.path, runs.state) == {}


def test_only_processes_that_carry_the_mark_of_a_task_are_found_and_ended(runs: Runs) -> None:
    """Not by a number, which may be another's by now."""
    runs.write(task("1", "true"))
    runs.run()
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    stranger = subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment)
    mark = "0" * 32
    try:
        state = load_state(state_path(runs.state, read_task_file(runs.path).digest), "a test")
        state.tasks["1"].marks.append(mark)
        state.save()
        assert stop_task_file(runs.path, runs.state) == {}
        assert stranger.poll() is None
        assert groups_of(mark) == set()
        with subprocess.Popen(["sleep", "1000"], start_new_session=True, env={MARK: mark}) as marked:
            assert groups_of(mark) == {marked.pid}
            assert end_marked(mark) == [marked.pid]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_failed_task_that_is_run_again_first_ends_what_it_had_left(runs: Runs) -> None:
    runs.write(task("1", "sleep 1000 & echo $! >> {{OUT}}/pid; test -e {{OUT}}/mended"))
    assert runs.run() == {"1": "failed"}
    (runs.folder / "mended").touch()
    assert runs.run() == {"1": "success"}
    first, second = runs.lines("pid")
    assert not alive(first)
    assert alive(second)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_resumes_at_its_task(runs: Runs, how: signal.Signals) -> None:
    """Also one that was killed and could note nothing; what it left is ended before the task runs again."""
    fifo = runs.folder / "fifo"
    os.mkfifo(fifo)
    runs.write(
        task("1", "export A=kept; echo 1 >> {{OUT}}/out"),
        task(
            "2",
            "test -e {{OUT}}/mended || { echo $$ > {{OUT}}/pid; echo up > {{OUT}}/fifo; sleep 1000; }",
            "echo $A >> {{OUT}}/out",
        ),
    )
    # Tests that run in the background of a script ignore SIGINT, and so would what they start.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "kvik.cli"]
    command += ["lab", "tasks", "run", str(runs.path), "--state", str(runs.state)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as runner:
        assert fifo.read_text() == "up\n"
        runner.send_signal(how)
        _, error = runner.communicate()
    assert runner.returncode == (-9 if how is signal.SIGKILL else 130)
    pid = runs.lines("pid")[0]
    assert alive(pid) == (how is signal.SIGKILL)
    if how is not signal.SIGKILL:
        assert b"run the same command to go on" in error
    (runs.folder / "mended").touch()
    assert runs.run() == {"1": "success", "2": "success"}
    assert not alive(pid)
    assert runs.lines() == ["1", "kept"]


def test_two_runs_of_one_file_at_a_time_are_refused(runs: Runs) -> None:
    runs.write(task("1", "true"))
    with (
        locked(state_path(runs.state, read_task_file(runs.path).digest)),
        pytest.raises(LabError, match="another run of this task file is under way"),
    ):
        runs.run()


def test_a_command_that_puts_off_its_mark_is_ended_at_its_time(runs: Runs) -> None:
    """Its process is the shell's own, and would be waited for as long as it likes."""
    runs.write(task("1", "exec env -i sh -c 'sleep 120; echo here > {{OUT}}/late'"))
    assert runs.run(timeout_s=1.0) == {"1": "timeout"}
    assert not runs.lines("late")


def test_a_damaged_state_is_named_and_reset_goes_on(runs: Runs) -> None:
    runs.write(task("1", "true"))
    runs.run()
    path = state_path(runs.state, read_task_file(runs.path).digest)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{", encoding="utf-8")
    with pytest.raises(LabError, match="begin anew with --reset"):
        runs.run()
    with pytest.raises(LabError, match="no state of a task file"):
        stop_task_file(runs.path, runs.state)  # not: nothing of it runs
    assert runs.run(reset=True) == {"1": "success"}


def test_a_full_disk_ends_a_run_by_name_and_keeps_what_was_done(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run begins behind the task that was noted as done."""
    runs.path.write_text(definition(task("A", "echo a"), task("B", "echo b")))
    run = ["tasks", "run", str(runs.path), "--state", str(runs.state)]

    def full(_descriptor: int) -> None:
        """No room from the beginning of B on."""
        if any("success" in file.read_text() for file in runs.state.glob("*.json")):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        stopped = CliRunner().invoke(cli.lab, run)
    (state,) = runs.state.glob("*.json")
    assert (stopped.exit_code, f"Error: {state}: No space left on device; what" in stopped.output) == (
        1,
        True,
    )
    assert sorted(one.suffix for one in runs.state.iterdir()) == [".json", ".lock", ".log"]
    again = CliRunner().invoke(cli.lab, run)
    assert (again.exit_code, "A: success before" in again.output, "B: success" in again.output) == (
        0,
        True,
        True,
    )


def test_a_dry_run_prints_the_commands_and_runs_none(runs: Runs) -> None:
    runs.write(task("1", "echo {{WORD}} > {{OUT}}/out", skip_if="test {{WORD}}"), WORD="hello")
    result = CliRunner().invoke(cli.lab, ["tasks", "run", "--dry-run", str(runs.path)])
    assert result.exit_code == 0
    assert (
        f"# 1: task 1\n# skipped if this succeeds: test hello\necho hello > {runs.folder}/out\n"
        == result.output
    )
    assert runs.lines() == []


def test_a_dry_run_begins_where_it_is_told_to(runs: Runs) -> None:
    runs.write(task("1", "echo one"), task("2", "echo two"), task("3", "echo three"))
    dry = ["tasks", "run", "--dry-run", str(runs.path), "--from"]
    second = CliRunner().invoke(cli.lab, [*dry, "2"])
    assert second.output == "# 2: task 2\necho two\n# 3: task 3\necho three\n"
    wrong = CliRunner().invoke(cli.lab, [*dry, "4"])
    assert wrong.exit_code == 2
    assert f"{runs.path}: no task '4'; its tasks: 1, 2, 3" in " ".join(wrong.output.split())


def test_the_commands_exit_statuses(runs: Runs) -> None:
    runs.write(task("1", "exit 3"))
    run = ["tasks", "run", str(runs.path), "--state", str(runs.state)]
    assert CliRunner().invoke(cli.lab, run).exit_code == 1
    as_json = CliRunner().invoke(cli.lab, [*run, "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["failed"] == "1"
    nowhere = CliRunner().invoke(cli.lab, [*run[:-1], str(runs.path / "state")])
    assert (nowhere.exit_code, "no state can be kept here: Not a directory" in nowhere.output) == (2, True)
    runs.path.write_text("{", encoding="utf-8")
    for arguments in (run, ["tasks", "import", str(runs.path)], ["tasks", "stop", str(runs.path)]):
        result = CliRunner().invoke(cli.lab, arguments)
        assert result.exit_code == 2
        assert f"{runs.path}:1:2: not JSON" in result.output
    small = str(ROOT / "lab" / "kvik_lab" / "study" / "examples" / "two-links.yaml")
    result = CliRunner().invoke(cli.lab, ["tasks", "export", small, "--out", str(runs.folder)])
    assert result.exit_code == 2
    assert "kind: layered" in result.output


def test_a_sweep_of_one_variable_is_a_factor_and_no_pattern_repeats_another(tmp_path: Path) -> None:
    for tokens in ("1000", "4000", "16000"):
        text = definition(task("1", "true"), TOKENS=tokens, RESULT=f"results/p{tokens}")
        (tmp_path / f"p{tokens}.json").write_text(text, encoding="utf-8")
    plan = import_plan([tmp_path])
    assert dict(plan.factors) == {"TOKENS": ("1000", "4000", "16000")}
    assert plan.labels == ("RESULT",)
    assert not plan.alike


def test_the_import_command_prints_the_plan(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli.lab, ["tasks", "export", str(ARTICLE_STUDY), "--out", str(tmp_path)])
    assert made.stdout == f"100 task files in {tmp_path}\n"
    assert made.stderr.startswith("infeasible, and written all the same: p14-efa-20k: tokens + max_tokens")
    assert made.stderr.count("\n") == 1
    shown = CliRunner().invoke(cli.lab, ["tasks", "import", str(tmp_path)]).output
    for line in (
        "59 patterns in 100 files",
        "constant: MAX_TOKENS = 10",
        "by part: PORT = 8200 (consumer), 8100 (main)",
        "the same as an earlier one: p14-efa-c1-1k = p14-efa-1k",
    ):
        assert line in shown
    as_json = json.loads(CliRunner().invoke(cli.lab, ["tasks", "import", "--json", str(tmp_path)]).output)
    assert len(as_json["files"]) == 100
