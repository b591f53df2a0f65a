"""kvik in vLLM's environment: `pip install kvik` finds there all that it asks for, and changes none of it."""

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(name: str) -> Iterator[Requirement]:
    """What a distribution asks for here, without extras."""
    for text in metadata.distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def brought_by(name: str) -> set[str]:
    """All that comes with a distribution, as far as it is installed."""
    found: set[str] = set()
    waiting: list[str] = [canonicalize_name(name)]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        try:
            asked: list[str] = [canonicalize_name(requirement.name) for requirement in requirements(one)]
        except metadata.PackageNotFoundError:
            continue  # left out of this environment: tools/locks/vllm.overrides
        found.add(one)
        waiting += asked
    return found


def test_kvik_asks_for_nothing_that_vllm_does_not_bring_itself() -> None:
    (vllm,) = set(metadata.packages_distributions()["vllm"])
    theirs = brought_by(vllm)
    assert "torch" in theirs
    ours = list(requirements("kvik"))
    assert len(ours) >= 6
    for requirement in ours:
        assert canonicalize_name(requirement.name) in theirs, f"vLLM does not bring {requirement.name}"
        installed = metadata.version(requirement.name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement}, not {installed}"
