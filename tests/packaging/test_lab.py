"""kvik without its lab says how to get it; `kvik[lab]` brings it, from a wheel of its own."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.packaging.commands import run
from tests.packaging.conftest import metadata_of

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]


def test_name_and_content(wheel: Path, lab_wheel: Path) -> None:
    """Python alone, with its data; none of it in kvik's wheel; each asks for the other's version."""
    assert re.fullmatch(r"kvik_lab-[\d.]+-py3-none-any\.whl", lab_wheel.name)
    names = set(zipfile.ZipFile(lab_wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvik_lab"}
    assert "kvik_lab/study/study.schema.json" in names
    others = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in others if name.startswith(("kvik_lab", "kvik/lab"))]
    kvik, lab = metadata_of(wheel), metadata_of(lab_wheel)
    assert lab.version == kvik.version
    assert [text for text in kvik.requires or [] if "extra" in text] == [
        f"kvik-lab=={kvik.version} ; extra == 'lab'"
    ]
    assert f"kvik=={kvik.version}" in (lab.requires or [])


def test_without_the_lab(empty_env: Path, tmp_path: Path) -> None:
    """Whatever is asked of it, the remedy is said, and the status is that of an error."""
    remedy = "pip install 'kvik[lab]=="
    assert remedy in " ".join(run(empty_env / "kvik", "--help", cwd=tmp_path).split())
    for words in (["lab"], ["lab", "--help"], ["lab", "fit", "data.csv", "--predict", "4GiB"]):
        argv = [str(empty_env / "kvik"), *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 1
        assert "kvik-lab, which is not installed" in done.stderr
        assert remedy in done.stderr


def test_with_the_lab(lab_env: Path, tmp_path: Path) -> None:
    """Its commands work, with what they compute and with the data of its package."""
    run(lab_env / "python", "-m", "pip", "check")
    assert "Design experiments" in run(lab_env / "kvik", "--help", cwd=tmp_path)
    assert '"$schema"' in run(lab_env / "kvik", "lab", "schema", cwd=tmp_path)
    links = ("--links", "tcp=10Gbit@100us,rdma=100Gbit@2ms", "--prompts", "100,8000")
    assert "rdma" in run(lab_env / "kvik", "lab", "advise", "llama-3.1-8b", *links, cwd=tmp_path)
