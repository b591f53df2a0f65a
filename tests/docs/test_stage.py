"""The test of commands can fail: what goes wrong on a page is found, and nothing stays behind."""

import os
import select
from pathlib import Path

import pytest

from tests.docs.commands import command_lines
from tests.docs.pages import ROOT, PageError, read
from tests.docs.stage import BlockError, stage

pytestmark = pytest.mark.timeout(600)


def has_ended(process: int) -> bool:
    """Whether it is gone, or ends at once: one that was killed closes its files a moment before its end."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


def run(tmp_path: Path, text: str) -> str:
    """Run a page with this text; returns what the folder's file `out` has at the end."""
    page = ROOT / "target" / f"test-page-{os.getpid()}.md"  # pytest has several processes
    page.write_text(text)
    read.cache_clear()
    try:
        blocks = read(page).blocks
    finally:
        page.unlink()
    folder = tmp_path / "stage"
    folder.mkdir()
    with stage(folder) as here:
        for block in blocks:
            here.save(block) if block.file else here.run(block)
        out = here.folder / "out"
        return out.read_text() if out.exists() else ""


def test_settings_of_whoever_runs_the_tests_are_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvik").mkdir()
    (tmp_path / "kvik" / "config.toml").write_text("[engine]\nchannels = 80\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("KVIK_DEADLINE", "none")
    assert "channels" in run(tmp_path, "```sh\nkvik config engine > out\n```\n")


def test_blocks_share_folder_variables_and_files(tmp_path: Path) -> None:
    """As at a prompt; a Python block is a script, unless it continues the one before."""
    text = """
<!-- file: sub/name.txt -->
```text
from a file
```

```sh
cd sub
export WORD="two words"
```

```sh
cat name.txt > ../out
echo "$WORD" >> ../out
```

```python
import os
x = os.environ["WORD"]
```

<!-- run: continues -->
```python
print(x.upper(), file=open("../out", "a"))
```
"""
    assert run(tmp_path, text) == "from a file\ntwo words\nTWO WORDS\n"


@pytest.mark.parametrize(
    "text",
    ["```sh\nfalse\n```", "```sh\nfalse\ntrue\n```", "```sh\nfalse | cat\n```", "```sh\nfalse && true\n```",
     "```python\n1 / 0\n```",
     "<!-- run: status 3 -->\n```sh\nexit 2\n```",
     '<!-- run: background until "never" -->\n```sh\necho other\n```'],
)  # fmt: skip
def test_a_block_that_fails_is_found(tmp_path: Path, text: str) -> None:
    """Whichever command of it, and a server that does not come up."""
    with pytest.raises(BlockError, match=r"test-page-\d+\.md:"):
        run(tmp_path, text)


def test_an_expected_status_is_right(tmp_path: Path) -> None:
    """A page may show an error."""
    run(tmp_path, "<!-- run: status 3 -->\n```sh\nexit 3\n```")


def test_what_runs_in_the_background_ends_with_the_page(tmp_path: Path) -> None:
    """Also what it started itself."""
    text = """
<!-- run: background until "up" -->
```sh
sleep 300 & echo $! > out; echo up; wait
```
"""
    assert has_ended(int(run(tmp_path, text)))


def test_what_runs_in_the_background_leaves_no_variables(tmp_path: Path) -> None:
    """It may end while a later block begins, which would find none at all, or those of before."""
    text = """
```sh
export WORD=first
```

<!-- run: background until "up" -->
```sh
export WORD=second; echo $$ > number; echo up
```

```sh
while grep -q . "/proc/$(cat number)/cmdline"; do sleep 0.01; done 2> /dev/null
```

```sh
echo "$WORD" > out
```
"""
    assert run(tmp_path, text) == "first\n"


def test_a_marker_that_nobody_understands_is_found(tmp_path: Path) -> None:
    """A typing error must not leave a block out."""
    with pytest.raises(PageError, match="backgrond"):
        run(tmp_path, '<!-- run: backgrond until "x" -->\n```sh\ntrue\n```')


def test_commands_over_several_lines_are_one() -> None:
    """With backslashes, and within quotes."""
    found = [line for line in command_lines("a \\\n  b 'c\nd' > g # no\nKVIK=1 e 2>&1 | f\n") if line]
    assert found == [["a", "b", "c\nd"], ["KVIK=1", "e"], ["f"]]
