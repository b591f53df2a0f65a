"""`kvik lab advise`, `fit` and `crossover`: what they say is what the numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvik_lab.cli import lab
from kvik_lab.errors import LabError
from kvik_lab.physics.advise import Setting, advise, moved, tokens_of
from kvik_lab.physics.kv import ModelKv
from kvik_lab.physics.links import parse_links
from kvik_lab.physics.units import format_seconds
from kvik_lab.physics.workload import parse_prompts, read_trace
from tests.lab.physics.simulate import Transport, line

MIB = np.array([16.0, 64, 128, 256, 512, 1024]) * 2**20
TCP, EFA = line(0.4e-3, 2.9e9), line(12e-3, 4.4e9)
CROSSING = (12e-3 - 0.4e-3) / (1 / 2.9e9 - 1 / 4.4e9)  # 98.7 MB


def run(*arguments: str) -> str:
    result = CliRunner().invoke(lab, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(lab, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tcp.csv and efa.csv: five starts, four repeats of six sizes."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(9)
    for name, truth in (("tcp", TCP), ("efa", EFA)):
        data = Transport(truth, 0.02, start=0.02).measure(rng, MIB, 4, starts=5, name=name)
        assert data.start is not None
        rows = zip(data.size, data.seconds, data.start, strict=True)
        text = "".join(f"{size:.0f},{seconds:.9f},{start}\n" for size, seconds, start in rows)
        Path(f"{name}.csv").write_text("bytes,seconds,start\n" + text)
    return tmp_path


ADVISE = ("advise", "qwen2.5-7b", "--prompts", "500,4000:0.5,12000")


@pytest.mark.usefixtures("files")
def test_advice_is_the_true_one_where_the_evidence_is_clear() -> None:
    links = "tcp=tcp.csv,price=1.2,efa=efa.csv,price=1.6"
    found: dict[str, Any] = json.loads(
        run(*ADVISE, "--links", links, "--rps", "2", "--output", "200", "--json")
    )
    assert [row["verdict"] for row in found["rows"]] == ["tcp", "efa", "efa"]
    region = found["crossings"][0]["region"]
    assert region["kind"] == "Bounded"
    assert region["lo"] < CROSSING < region["hi"]
    assert found["crossings"][0]["none_in_range"] < 0.01
    sizes = np.array([512.0, 4000, 12_000]) * 57_344
    truth = float(np.array([0.25, 0.5, 0.25]) @ (TCP(sizes) - EFA(sizes)))
    gap = found["overall"]
    assert gap["faster"] == "efa"
    assert gap["lo"] < truth < gap["hi"]
    tokens = 0.25 * 500 + 0.5 * 4000 + 0.25 * 12_000 + 200
    costs = {cost["link"]: cost for cost in found["costs"]}
    assert costs["tcp"]["per_million_tokens"] == pytest.approx(1.2 / (2 * 3600 * tokens) * 1e6)
    text = " ".join(found["sentences"])
    assert f"a saved second of waiting then costs {0.4 / 7200 / gap['seconds']:.3g}" in text
    assert "efa costs 0.4 an hour more than tcp" in text


@pytest.mark.usefixtures("files")
def test_near_the_crossover_the_evidence_is_called_insufficient() -> None:
    tokens = round(CROSSING / 57_344)
    asked = ("advise", "qwen2.5-7b", "--prompts", str(tokens), "--links", "tcp.csv,efa.csv")
    text = run(*asked, "--margin", "0")
    assert f"Prompts of {tokens:,} tokens: insufficient evidence for either." in text
    calm = run(*asked, "--margin", "8ms")
    assert "no difference that matters (within 8 ms)" in calm


def test_of_three_links_the_fastest_is_compared_with_each() -> None:
    """One that is as fast says nothing of one that is a hundred times slower."""
    links = "a=100Gbit@100us,b=100.1Gbit@100us,c=1Gbit@100ms"
    asked = ("advise", "qwen2.5-7b", "--links", links, "--prompts", "1000,90000")
    found = json.loads(run(*asked, "--margin", "1ms", "--json"))
    assert [row["undecided"] for row in found["rows"]] == [["b", "a"], ["b", "a"]]
    assert [(gap["faster"], gap["slower"]) for gap in found["rivals"]] == [("b", "a"), ("b", "c")]
    text = " ".join(found["sentences"])
    assert "tokens: no difference that matters (within 1 ms) between b and a; slower: c." in text
    assert " faster than a a request" in text
    assert " faster than c a request" in text
    assert "no difference that matters: b, a" in run(*asked)
    assert "90,000 tokens: b, faster by" in run(*asked, "--margin", "10us")


@pytest.mark.usefixtures("files")
def test_evidence_that_is_lacking_for_one_rival_is_not_hidden_by_another() -> None:
    """`same` is as fast within the margin, and what `wide` was measured with says little."""
    rows = [line.split(",") for line in Path("tcp.csv").read_text().splitlines()[1:]]
    same = "".join(f"{size},{float(seconds) * 1.001},{start}\n" for size, seconds, start in rows)
    Path("same.csv").write_text(f"bytes,seconds,start\n{same}")
    wide = "".join(f"{n}e6,{n / 2900 * (1 + i / 3)}\n" for n in (10, 20, 40) for i in range(-2, 4))
    Path("wide.csv").write_text(f"bytes,seconds\n{wide}")
    asked = ("advise", "qwen2.5-7b", "--links", "tcp.csv,same.csv,wide.csv,slow=0.1Gbit@0", "--margin", "1ms")
    row = json.loads(run(*asked, "--prompts", "400", "--json"))["rows"][0]
    assert (row["verdict"], row["undecided"]) == ("insufficient evidence", ["tcp", "same", "wide"])
    assert "insufficient evidence for tcp, same or wide; slower: slow." in run(*asked, "--prompts", "400")


def test_stated_rates_are_arithmetic_and_never_called_evidence() -> None:
    links = "tcp=25Gbit@200us,rdma=100Gbit@1ms"
    found = json.loads(run(*ADVISE, "--links", links, "--json"))
    assert found["rows"][0]["seconds"]["tcp"] == pytest.approx(200e-6 + 512 * 57_344 / 3.125e9)
    assert found["rows"][0]["gap"]["probability"] is None
    assert found["crossings"][0]["estimates"] == [pytest.approx(800e-6 / (1 / 3.125e9 - 1 / 12.5e9))]
    assert found["floors"][0]["seconds"]["transfer by tcp"] == pytest.approx(512 * 57_344 / 3.125e9)
    assert any("No link was measured" in text for text in found["sentences"])


@pytest.mark.usefixtures("files")
def test_sizes_beyond_the_measured_ones_are_flagged_or_left_without_an_answer() -> None:
    text = run("advise", "qwen2.5-7b", "--prompts", "64000", "--links", "tcp.csv,efa.csv")
    assert "Prompts of 64,000 tokens lie outside of the measured sizes: extrapolated." in text
    Path("bent.csv").write_text(
        "bytes,seconds\n"
        + "".join(f"{n}e6,{n * n / 1e4 * (1 + i / 1e3)}\n" for n in (10, 50, 100) for i in range(6))
    )
    text = run("advise", "qwen2.5-7b", "--prompts", "64000", "--links", "bent.csv,efa.csv")
    assert "insufficient evidence" in text
    assert "No answer for the whole workload" in text


@pytest.mark.usefixtures("files")
def test_a_link_that_was_faster_than_its_hardware_is_named() -> None:
    text = run(*ADVISE, "--links", "tcp=tcp.csv,line=20Gbit,efa=efa.csv,line=100Gbit")
    assert "tcp: 16.8 MB took less than the line rate" in text
    assert "efa: 16" not in text


def test_a_link_that_cannot_carry_the_workload_is_named() -> None:
    text = run(*ADVISE, "--links", "slow=1Gbit@1ms,fast=400Gbit@1ms", "--rps", "3")
    assert "slow cannot carry this workload" in text
    assert "fast cannot" not in text


def test_waiting_for_a_link_is_that_of_a_queue_with_constant_service() -> None:
    """Pollaczek and Khinchine with one length: busy / (2 (1 - busy)) transfers."""
    model = ModelKv.resolve("qwen2.5-7b")
    links = parse_links(["a=8Gbit@0,b=80Gbit@0"])
    found = advise(model, links, parse_prompts("16000", 0, 0.5))
    seconds = 16_000 * 57_344 / 1e9
    busy = 0.5 * seconds
    assert found.costs[0].busy == pytest.approx(busy)
    assert found.costs[0].waiting == pytest.approx(seconds * busy / (2 * (1 - busy)))


def test_prompt_lengths_and_bytes_are_each_others_inverse() -> None:
    model = ModelKv.resolve("llama-3.1-8b")
    for setting in (Setting(), Setting(32, tp=4), Setting(16, pp=2)):
        for tokens in (64, 4096, 100_000 // 32 * 32):
            assert tokens_of(model, moved(model, tokens, setting), setting) == tokens
    bounded = ModelKv(model.shape, (128,) * 32)
    assert tokens_of(bounded, 1e12, Setting()) is None


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 1000 + i % 2, "output_length": 10} for i in range(101)]
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = read_trace(path, None)
    assert workload.per_second == pytest.approx(101 / 50)
    assert workload.lengths.tolist() == [1000, 1001]
    assert workload.shares.sum() == pytest.approx(1)
    assert workload.output_tokens == 10


def test_a_trace_with_numbers_that_are_none_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1, "output_length": 1}\n{"input_length": Infinity}\n')
    with pytest.raises(LabError, match="line 2: not a request"):
        read_trace(path, None)
    path.write_text('{"input_length": 1, "output_length": NaN}\n')
    with pytest.raises(LabError, match="an output from 0"):
        read_trace(path, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1 s"),
        (0.9994, "999 ms"),
        (9.996e-4, "1 ms"),
        (9.997e-7, "1 us"),
        (999.7, "1,000 s"),
        (0, "0 s"),
    ],
)
def test_no_duration_is_printed_as_a_thousand_of_the_unit_below(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_probability_is_of_the_range_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight pieces measured far beyond the prompts, that cross where no prompt is."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("a", (1.0, 2.0, 9.0)), ("b", (3.0, 4.0, 5.0))):
        means = zip((1, 2, 8), seconds, strict=True)
        rows = (f"{at}e8,{value * (1 + i / 1e3)}\n" for at, value in means for i in range(6))
        Path(f"{name}.csv").write_text("bytes,seconds\n" + "".join(rows))
    asked = ("advise", "qwen2.5-7b", "--links", "a.csv,b.csv", "--prompts")
    found = json.loads(run(*asked, "1800,3200", "--json"))["crossings"][0]
    assert found["method"] == "interpolate"
    assert found["range"] == [1808 * 57_344, 3200 * 57_344]
    assert found["none_in_range"] > 0.99
    assert "no crossing from 1,808 tokens to 3,200 tokens: over 0.999" in run(*asked, "1800,3200")


def test_means_without_errors_are_not_called_stated_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.csv").write_text(f"bytes,mean_seconds\n1e6,0.0{len(name)}\n1e9,0.{ord(name)}\n")
    text = run(*ADVISE, "--links", "a.csv,b.csv")
    assert "stated" not in text
    assert "faster than b a request; nothing is known of the error of that" in text


def test_a_dearer_link_that_saves_nothing_has_no_price_of_a_second() -> None:
    links = "a=25Gbit@200us,price=2,b=25Gbit@200us,price=1"
    text = run(*ADVISE, "--links", links, "--rps", "3")
    assert "a costs 1 an hour more than b" in text
    assert "there is no evidence that this saves time" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompts", "1000", "--links", "a=1Gbit@0"), "two links at least"),
        (("--prompts", "1000", "--links", "a=1Gbit@0,a=2Gbit@0"), "names of their own"),
        (("--prompts", "1000", "--links", "a=1G@0,b=2Gbit@0"), "is no rate"),
        (("--prompts", "1000", "--links", "a=1Gbit@7,b=2Gbit@0"), "is no duration"),
        (("--prompts", "1000", "--links", "price=3,b=2Gbit@0"), "before the link"),
        (("--prompts", "1000", "--links", "a=none.csv,b=2Gbit@0"), "is no file here"),
        (("--prompts", "1000:2", "--links", "a=1Gbit@0,b=2Gbit@0"), "share above 0 and up to 1"),
        (("--prompts", "1:.5,2:.6", "--links", "a=1Gbit@0,b=2Gbit@0"), "come to 1.1"),
        (("--links", "a=1Gbit@0,b=2Gbit@0"), "--prompts or --trace"),
        (("--prompts", "1", "--links", "a=1Gbit@0,b=2Gbit@0", "--rps", "0"), "above 0"),
        (("--prompts", "1", "--links", "a=1Gbit@0,b=2Gbit@0", "--level", "95"), "for example 0.95"),
    ],
)
def test_what_cannot_be_advised_on_is_refused_with_a_remedy(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("advise", "qwen2.5-7b", *arguments)


@pytest.mark.usefixtures("files")
def test_crossover_and_fit_are_the_same_from_the_command() -> None:
    found = json.loads(run("crossover", "tcp.csv", "efa.csv", "--json"))
    assert found["region"]["lo"] < CROSSING < found["region"]["hi"]
    assert "95 % set of crossovers: from" in run("crossover", "tcp.csv", "efa.csv")
    assert "--range is '5'" in refused("crossover", "tcp.csv", "efa.csv", "--range", "5")
    fitted = json.loads(run("fit", "tcp.csv", "--predict", "512MiB,4GiB", "--json"))
    first = fitted["fits"][0]
    assert first["model"]["name"] == "hockney"
    bandwidth = next(p for p in first["parameters"] if p["name"] == "seconds_per_byte")
    assert bandwidth["lo"] < 1 / 2.9e9 < bandwidth["hi"]
    assert fitted["predictions"]["4GiB"]["extrapolated"]
    assert not fitted["predictions"]["512MiB"]["extrapolated"]
    text = run("fit", "tcp.csv", "--predict", "4GiB")
    assert "extrapolated 4 times beyond what was measured" in text
    assert "--queue N" in refused("fit", "tcp.csv", "--model", "batched-queue")
    Path("empty.csv").write_text("")
    assert "no data" in refused("fit", "empty.csv")
