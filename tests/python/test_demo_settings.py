"""What the demo refuses before it starts anything, and that it says why."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvik.bench import facts
from kvik.demo import emulator_scene
from kvik.demo.scene import KvFacts, Link, Place, Ranks, SettingError, Settings
from kvik.demo.show import demo
from kvik.roles.hosts import Host, Rate


@pytest.mark.parametrize(
    ("text", "bits"), [("10gbit", 10e9), ("2.5Gbit", 2.5e9), ("500mbit/s", 500e6), ("1tbit", 1e12)]
)
def test_rates(text: str, bits: float) -> None:
    """In tc's words."""
    rate = Rate.parse(text)
    assert rate.bits == bits
    assert rate.seconds(10**9) == 8e9 / bits


@pytest.mark.parametrize("text", ["", "10", "10gb", "fast", "-1gbit", "0gbit", "1kbit", "1e9bit", "1.gbit"])
def test_no_rates(text: str) -> None:
    """Words that are no rate, and rates at which nothing would be seen."""
    with pytest.raises(ValueError, match=r"10gbit|too slow"):
        Rate.parse(text)


def test_ranks() -> None:
    """One number for both, or one each."""
    assert Ranks.parse("2") == Ranks(2, 2)
    assert Ranks.parse("4:2") == Ranks(4, 2)
    assert str(Ranks(4, 2)) == "tp 4 to 2"
    for text in ("", "0", "4:0", "4:2:1", "a", "65", "-1"):
        with pytest.raises(SettingError, match="--tp"):
            Ranks.parse(text)


def test_what_has_to_come_over() -> None:
    """Whole KV blocks, and none for a prompt of one token."""
    kv = KvFacts(16, 1000, range(1, 10))
    assert [kv.bytes_of(length) for length in (1, 2, 16, 17)] == [0, 1000, 1000, 2000]


@pytest.mark.parametrize(("length", "wanted"), [(1, 17), (17, 17), (1000, 1000)])
def test_the_second_act_has_a_block_to_find(length: int, wanted: int) -> None:
    """Also of prompts whose KV need not come over."""
    host = Host("a", "192.0.2.1", "2001:db8::1", -1)
    settings = Settings((length,), "", Ranks(1, 1), "auto", None)
    place = Place(Link(Rate.parse("10gbit"), host, host, "a secret"))
    assert emulator_scene._act_length(settings, place) == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lengths", "a"], "not a list of numbers"),
        (["--lengths", "0"], "not a list of numbers"),
        (["--lengths", "10,,20"], "not a list of numbers"),
        (["--lengths", "99999999"], "takes 131,072 tokens"),
        (["--tp", "x"], "not a number of ranks"),
        (["--tp", "3"], "cannot be split"),
        (["--model-shape", "llama-3.1-8"], "llama-3.1-8b"),
        (["--link-rate", "10"], "not a rate"),
        (["--link-rate", "1gbit", "--transport", "local"], "stays on one host"),
        (["--link-rate", "1mbit"], "choose shorter --lengths"),
        (["--transport", "pigeon"], "pigeon"),
        (["--svg", "/nonexistent/demo.svg"], "no folder for /nonexistent/demo.svg"),
        (["--engine", "vllm"], "`ENGINE=vllm make demo` installs it"),
    ],
)
def test_refused_before_anything_starts(options: list[str], said: str) -> None:
    """With the status that a shell knows for a wrong command line."""
    result = CliRunner().invoke(demo, options)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is needed, how much there is, and what would need less."""
    monkeypatch.setattr(facts, "memory_available", lambda: 100 << 20)
    result = CliRunner().invoke(demo, ["--lengths", "4000"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"not enough memory: three engines with 4,000 tokens of {emulator_scene.SHAPE} want" in said
    assert "100 MiB are free; try --lengths 1000" in said


def test_a_container_may_have_less_memory_than_its_machine(tmp_path: Path) -> None:
    """The smaller of what the kernel and the control group allow."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000000 kB\nMemAvailable:    2000000 kB\n")
    assert facts.memory_available(meminfo, tmp_path) == 2000000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000000\n")
    assert facts.memory_available(meminfo, tmp_path) == 2000000 << 10
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert facts.memory_available(meminfo, tmp_path) == 200000000
    (tmp_path / "memory.max").write_text("100\n")
    assert facts.memory_available(meminfo, tmp_path) == 0
