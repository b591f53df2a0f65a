"""torch's tensors on a GPU: between two processes, behind their streams, and in a handover.

They take KVIK_TEST_GPU=1 and a torch that has CUDA: of this environment, or of the Python that
KVIK_TEST_TORCH_PYTHON names.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvik
from tests.python import gpu_torch
from tests.python.gpu import ON_GPU
from tests.python.peers import LIMIT, Peer, Start, random_seed

SLOW = 3 * LIMIT  # seconds for a process that imports torch
EXPANDABLE = "expandable_segments:True"
HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@pytest.fixture(scope="session")
def torch(gpu_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A Python that has a torch with CUDA, and its variables."""
    if not ON_GPU:
        pytest.skip("KVIK_TEST_GPU is not set")
    python, env = os.environ.get("KVIK_TEST_TORCH_PYTHON", sys.executable), dict(gpu_env)
    if python != sys.executable:
        # Nothing of this environment but kvik itself.
        folder = tmp_path_factory.mktemp("kvik")
        (folder / "kvik").symlink_to(Path(kvik.__file__).parent)
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run([python, "-c", HAS_CUDA], env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2] or "torch.cuda.is_available() says no"
        pytest.skip(f"{python} has no torch for CUDA ({last}); KVIK_TEST_TORCH_PYTHON names another one")
    return python, env


def between(start: Start, transport: kvik.TransportName, form: str, seed: int, rounds: int) -> None:
    owning = Peer(gpu_torch.owner, start, transport=transport)
    with owning as owner, Peer(gpu_torch.reader, start, transport=transport) as reader:
        for number in range(seed, seed + rounds):
            there, here = gpu_torch.drawn(number)
            owner.say(do="grant", form=form, blocks=there, seed=number)
            ticket = owner.hear(SLOW)["ticket"]
            reader.say(do="read", form=form, blocks=here, there=there, seed=number, ticket=ticket)
            said = reader.hear(SLOW)
            assert said["same"], (form, transport)
            if transport == "auto":
                assert any("expandable_segments" in why for why in said["rejected"]), said
            else:
                assert said["transport"] == transport, said
            assert owner.hear() == {"state": "consumed"}
        for peer in (owner, reader):
            peer.say(do="bye")
            assert peer.end() == 0


@pytest.mark.parametrize("form", list(gpu_torch.FORMS))
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_tensors_of_two_processes(torch: Start, transport: kvik.TransportName, form: str) -> None:
    """What a stream writes just before the grant is read, and what another one still writes is waited for."""
    between(torch, transport, form, random_seed(), rounds=3)


def test_tensors_in_expandable_segments(torch: Start) -> None:
    """They have no handle for other processes: the reader takes another transport, and says why."""
    python, env = torch
    told = {**env, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": EXPANDABLE}
    between((python, told), "auto", "NHD", random_seed(), rounds=1)


@pytest.mark.parametrize("form", ["NHD", "HND", "HND, blocks first", "MLA"])
def test_a_handover_of_tensors(torch: Start, form: str) -> None:
    """Every byte arrives, no other one changes, and both servers' streams are waited for."""
    with Peer(gpu_torch.handover, torch, form=form) as peer:
        assert peer.hear(SLOW) == {"order": "NHC" if form == "NHD" else "HNC"}
        assert peer.end() == 0
