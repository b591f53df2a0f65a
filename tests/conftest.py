"""What holds for all tests: they do not see the settings of whoever runs them, and a skipped test is a
failure, unless it is named here with its reason; `make test` prints those at its end."""

import json
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

NO_NAMESPACES = "network namespaces take root (CAP_SYS_ADMIN) and iproute2"
NO_MACHINES = "mount namespaces take root (CAP_SYS_ADMIN)"
NO_HELM = "helm, which the stage `python` has from a package"
NO_TORCH = "KVIK_TEST_GPU=1, a GPU, and a torch for CUDA (KVIK_TEST_TORCH_PYTHON): see make gpu-check"
NO_GUEST = "the stage `rdma` (make test-rdma) prepares the virtual machine, and runs these tests"
NO_TOOL = "a Python with vLLM or aiperf: KVIK_TEST_VLLM_PYTHON or .venv/vllm, KVIK_TEST_AIPERF_PYTHON"
# Test or file of tests (as pytest prints it, without parameters) -> why a machine may go without it.
MAY_SKIP: dict[str, str] = {
    "tests/fabric/test_newer.py": "a libfabric of 2.1 or newer, which the stage builds for root on Debian",
    "tests/faults/test_lab.py::test_a_cable_that_is_pulled_out": NO_NAMESPACES,
    "tests/lab/report/test_browser.py": "a browser, chromium, which the stage installs for root on Debian",
    "tests/lab/run/test_ray.py": f"{NO_NAMESPACES}; and ray, which the dev environment has",
    "tests/lab/run/test_slurm.py": f"{NO_NAMESPACES}; and Slurm, which the build installs for root on Debian",
    "tests/lab/tracking/test_server.py::test_its_page": "a browser, as above",
    "tests/lab/run/test_tools.py::test_a_tool_sends_the_load_of_a_study": NO_TOOL,
    "tests/lab/run/test_transfers.py::test_pages_are_moved_over_a_link": NO_NAMESPACES,
    "tests/netns/test_bench.py": NO_NAMESPACES,
    "tests/netns/test_demo.py": NO_NAMESPACES,
    "tests/netns/test_engines.py": NO_NAMESPACES,
    "tests/netns/test_hosts.py": NO_NAMESPACES,
    "tests/packaging/test_machines.py": NO_MACHINES,
    "tests/python/test_chart.py": NO_HELM,
    "tests/python/test_chart_runs.py": f"{NO_HELM}; or etcd or moto, as below",
    "tests/python/test_deploy.py::test_kustomize_builds": "kubectl, which `python` has as helm",
    "tests/python/test_deploy_store_runs.py": NO_MACHINES,
    "tests/python/test_gpu_torch.py": NO_TORCH,
    "tests/python/test_gpus.py::test_what_the_driver_refuses_is_said_in_its_words": "a driver that fails",
    "tests/python/test_store_dashboard.py": "prometheus, which the build installs for root on Debian",
    "tests/python/test_store_etcd.py": "etcd, which the build installs for root on Debian",
    "tests/python/test_store_members.py": "etcd, which the build installs for root on Debian",
    "tests/python/test_store_object.py": "moto, an S3 server, which the dev environment has",
    "tests/rdma/test_devices.py": NO_GUEST,
    "tests/rdma/test_guest.py": NO_GUEST,
    "tests/rdma/test_guest.py::test_a_guest_that_dies": "it takes another boot: make test-rdma FULL=1",
    "tests/rdma/test_late.py": NO_GUEST,
    "tests/rdma/test_late.py::test_nothing_is_written_or_read_late": "minutes more: make test-rdma FULL=1",
    "tests/rdma/test_nics.py": NO_GUEST,
    "tests/rdma/test_programs.py": NO_GUEST,
    "tests/vllm/test_two_hosts.py": NO_NAMESPACES,
}

_unexpected: list[str] = []

# What the build and the tests themselves set. Any other variable of kvik, and a configuration file, would
# change the engines under test.
OWN_VARIABLES = re.compile(r"KVIK_(TEST_\w+|SCHEDULES|SEED)")
for _name in [name for name in os.environ if name.startswith("KVIK_")]:
    if not OWN_VARIABLES.fullmatch(_name):
        del os.environ[_name]
os.environ["KVIK_CONFIG"] = os.devnull

# A script's job in the background ignores Ctrl-C, and so would the programs that tests start to interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that is not listed into a failure, and note one that is."""
    report = yield
    if report.skipped:
        name = report.nodeid.partition("[")[0]
        reason = MAY_SKIP.get(name) or MAY_SKIP.get(name.partition("::")[0])
        said = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason is not None:
            note(report.nodeid, f"{reason} ({said})")
        else:
            report.outcome = "failed"
            report.longrepr = f"skipped, and not listed in tests/conftest.py as one that may be: {said}"
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself is found out, too."""
    if report.skipped:
        _unexpected.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail for modules that were skipped as a whole."""
    if _unexpected:
        print(f"\nskipped as a whole, which no test may be: {', '.join(_unexpected)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def note(name: str, reason: str) -> None:
    """Say at the end of `make test` that something was left out."""
    file = os.environ.get("KVIK_TEST_SKIPS_FILE")
    if file:
        with Path(file).open("a") as out:
            out.write(json.dumps({"name": name, "reason": reason}) + "\n")
