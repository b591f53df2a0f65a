"""Real serving engines for the tests of this folder.

They are shared: one engine alone for the whole session, and one pair (prefill, decode, router) at a time.
pytest orders the tests by the pair that they ask for. All but one pair are forks of a process in which vLLM
is imported already (`fork_parent`), since imports are nine tenths of a start. Where a test is about to wait
for the end of a grant, which takes no processor, the engines of the next pair begin to start (`meanwhile`).
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.demo.checkpoint import ensure_checkpoint
from kvik.demo.engines import EngineSpec
from kvik.roles.hosts import CannotError
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from tests.netns.hosts import two_hosts
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import START_LIMIT, THIS_HOST, Pair, PairSpec, Starting, begin_pair, start_engine

NGRAMS = json.dumps({
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
})  # fmt: skip
SMALL_STEPS = ["--max-num-batched-tokens", "256"]  # a long prompt is computed in several
WINDOW = 300  # tokens that a token sees in every other layer
WINDOWS = json.dumps({"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2})
# Of offers that are taken after others, by tests that wait for no expiry.
UNHURRIED = {"expiry": 60.0}
SPECS = {
    spec.name: spec
    for spec in (
        PairSpec("no-prefix-cache"),
        PairSpec(
            "prefix-cache",
            prefix_caching=True,
            extra=UNHURRIED,
            adapter=True,
            arguments=[*SMALL_STEPS, "--async-scheduling"],
        ),
        PairSpec("several", several=True, decode_arguments=["--speculative-config", NGRAMS]),
        PairSpec("stored", extra={"store": {"host_cache": "64MiB"}}),
        PairSpec("windows", prefix_caching=True, arguments=["--hf-overrides", WINDOWS, *SMALL_STEPS]),
        PairSpec("dp2", arguments=["--data-parallel-size", "2"], unsaid=True),
        PairSpec("tp2", ranks=(2, 2), extra=UNHURRIED),
        PairSpec("tp1-tp2", ranks=(1, 2), both=True),
        PairSpec("pp1-pp2", stages=(1, 2), both=True),
        PairSpec(
            "wired", wired=True, extra={"expiry": 8.0}, decode_arguments=["--num-gpu-blocks-override", "40"]
        ),
        PairSpec("stream", mode="stream", wired=True, extra={"expiry": 60.0}),
        # For tests that wait until prefill's grants have ended.
        PairSpec("stream-brief", mode="stream", wired=True, extra={"expiry": 25.0}),
        PairSpec(
            "stream-cached",
            mode="stream",
            extra={"expiry": 60.0},
            prefix_caching=True,
            arguments=[*SMALL_STEPS, "--async-scheduling"],
            ranks=(2, 1),
        ),
        # As a user starts them.
        PairSpec("two-hosts", secrets=("one secret of both", "one secret of both"), forked=False),
        PairSpec("two-secrets", secrets=("the secret of prefill", "the secret of decode")),
    )
}
TRUST: list[str] = []  # the table of test_trust
Meanwhile = Callable[[], None]


class Reference:
    """What one engine alone answers to prompts: each is computed once, and one at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPoolExecutor(1)
        self._held = threading.Lock()
        self._known: dict[tuple[int, ...], Future[list[int]]] = {}

    def __call__(self, prompt: list[int], tokens: int) -> list[int]:
        """So many tokens."""
        return self.soon(prompt, tokens).result()

    def soon(self, prompt: list[int], tokens: int) -> Future[list[int]]:
        """The same, without waiting: a test that asks for it before it needs it lets both processors work."""
        key = (tokens, *prompt)
        with self._held:
            one = self._known.get(key)
            if one is None or one.cancelled() or (one.done() and one.exception() is not None):
                one = self._known[key] = self._pool.submit(self._ask, prompt, tokens)
            return one

    def _ask(self, prompt: list[int], tokens: int) -> list[int]:
        answer = client.complete(self._url, prompt, tokens).tokens
        assert len(answer) == tokens
        return answer

    def stop(self) -> None:
        """Ask for nothing more."""
        self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def expected(
    reference: Reference, prompts: Sequence[list[int]], tokens: int
) -> Iterator[list[Future[list[int]]]]:
    """The answers of the engine alone, while the block has a pair answer: it has not to wait for them
    afterwards. After a failure nothing is left to be computed."""
    answers = [reference.soon(prompt, tokens) for prompt in prompts]
    try:
        yield answers
    finally:
        for one in answers:
            one.cancel()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and give them time for the starts of engines."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(START_LIMIT + 180))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the table of the cases that must never be answered with wrong tokens."""
    if TRUST:
        terminalreporter.section("case, HTTP status, tokens, seconds, KV blocks back")
        for line in TRUST:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny checkpoint."""
    return ensure_checkpoint()


@pytest.fixture(scope="session")
def fork_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkParent]:
    """The process that servers are forked from. They can be told to reset their prefix cache: vLLM reads that
    when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with ForkParent(tmp_path_factory.mktemp("fork-parent")) as parent:
            yield parent


@pytest.fixture(scope="session", autouse=True)
def imports(request: pytest.FixtureRequest) -> None:
    """Where some test needs a server, vLLM is imported there while the first tests run, which need none."""
    if any("fork_parent" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("fork_parent")


@pytest.fixture(scope="session")
def alone(
    model: Path, fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    """One engine without a connector and without a prefix cache: what every answer is compared with.

    It is not waited for here, so that it comes up beside the first pair.
    """
    with Fleet() as fleet:
        spec = EngineSpec("alone", prefix_caching=False)
        port, folder = free_ports(1)[0], tmp_path_factory.mktemp("alone")
        yield fleet.add(start_engine(fork_parent, model, spec, port, folder))


class Pairs:
    """Starts pairs, each once. Ends those that are no longer asked for while the next one starts."""

    def __init__(self, model: Path, parent: ForkParent, folder: Callable[[], Path]) -> None:
        self._model, self._parent, self._folder = model, parent, folder
        self._begun: dict[str, tuple[Starting, contextlib.ExitStack]] = {}
        self._running: set[str] = set()
        self._ender = ThreadPoolExecutor(1)
        self._ends: list[Future[None]] = []

    def begin(self, name: str) -> None:
        """Start the engines of a pair, unless they were started. `CannotError`: it takes two hosts, and this
        machine has no network namespaces for us."""
        if name in self._begun or name in self._running:
            return
        spec = SPECS[name]
        with contextlib.ExitStack() as stack:
            hosts = THIS_HOST if spec.secrets is None else stack.enter_context(two_hosts())
            starting = begin_pair(spec, self._model, self._folder() / name, hosts, self._parent)
            stack.callback(starting.stop)
            self._begun[name] = (starting, stack.pop_all())

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[Pair]:
        """A pair, until the block ends."""
        self.begin(name)
        starting, stack = self._begun.pop(name)
        self._running.add(name)
        try:
            yield starting.ready()
        finally:
            self._running.discard(name)
            self._ends.append(self._ender.submit(stack.close))

    def stop(self) -> None:
        """End those that have begun and that nobody has asked for, and wait for all ends."""
        for _, stack in self._begun.values():
            self._ends.append(self._ender.submit(stack.close))
        self._ender.shutdown()
        for end in self._ends:
            end.result()


@pytest.fixture(scope="session")
def pairs(model: Path, fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """What starts the pairs."""
    made = Pairs(model, fork_parent, lambda: tmp_path_factory.mktemp("pair"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, alone: HttpServer, pairs: Pairs) -> Iterator[Pair]:
    """The pair whose name is the test's parameter."""
    try:
        pairs.begin(request.param)
    except CannotError as cannot:
        pytest.skip(str(cannot))
    with pairs.running(request.param) as running:
        alone.wait_ready(time.monotonic() + START_LIMIT)
        yield running


@pytest.fixture
def meanwhile(request: pytest.FixtureRequest, pairs: Pairs) -> Meanwhile:
    """Starts the engines of the pair that later tests ask for next. A test calls it when all that it has left
    to do is to wait, and on the host of this process."""
    items: list[pytest.Item] = request.session.items
    own = _pair_of(request.node)
    names = (_pair_of(item) for item in items[items.index(request.node) :])
    following = next((name for name in names if name not in (None, own)), None)

    def begin() -> None:
        # Where it is not possible, the tests that ask for the pair say so.
        with contextlib.suppress(CannotError):
            if following is not None:
                pairs.begin(following)

    return begin


def _pair_of(item: pytest.Item) -> str | None:
    """The name of the pair that a test asks for."""
    name = item.callspec.params.get("pair") if hasattr(item, "callspec") else None
    return None if name is None else str(name)


@pytest.fixture(scope="session")
def reference(alone: HttpServer) -> Iterator[Reference]:
    """The tokens that the engine alone answers to a prompt."""
    alone.wait_ready(time.monotonic() + START_LIMIT)
    made = Reference(alone.url)
    yield made
    made.stop()
