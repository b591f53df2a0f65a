"""One mutation, tried out: what came back, and what was left behind."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN
from kvik.demo.engines import BLOCK_TOKENS
from kvik.demo.reports import Load, ReportReader
from kvik.roles.processes import HttpServer
from tests.vllm.pairs import ASK_PREFILL, COMPUTED
from tests.vllm.params.mutations import Mutation, Params

TOKENS = 12
LENGTHS = (2 * BLOCK_TOKENS + 20, 5 * BLOCK_TOKENS)
REFUSED = (400, 422)  # vLLM's own answers to a request that it does not understand
# Prompts of which decode has not nearly all in its prefix cache when the first one was answered.
OF_THEIR_OWN = ("other", "shares", "same")
Truth = Callable[[list[int], int], list[int]]
Salted = tuple[list[int], str | None]


@dataclass(frozen=True)
class Scene:
    """Running servers: some that prefill, one that decodes and its reports, and one engine's own answers."""

    prefills: Sequence[HttpServer]
    decode: HttpServer
    reports: ReportReader
    truth: Truth

    def offer(self, server: int, prompt: list[int], salt: str | None) -> Params:
        """The parameters of a prompt that a prefill server has computed."""
        payload = client.body(prompt, 1, kv_transfer_params=ASK_PREFILL, **_salt(salt))
        params = client.post(self.prefills[server].url, payload)["kv_transfer_params"]
        assert isinstance(params, dict), f"{self.prefills[server].name} offers nothing"
        return params

    def ask(self, prompts: Sequence[list[int]], salt: str | None, params: object = None) -> list[list[int]]:
        """Decode's answers to some prompts in one request."""
        asked: object = prompts[0] if len(prompts) == 1 else list(prompts)
        payload = client.body([], TOKENS, **_salt(salt)) | {"prompt": asked}
        if params is not None:
            payload["kv_transfer_params"] = params
        answer = client.post(self.decode.url, payload)
        choices = answer["choices"]
        assert isinstance(choices, list)
        return [list(choice["token_ids"]) for choice in sorted(choices, key=lambda choice: choice["index"])]

    def computed(self) -> int:
        """Prompt tokens that decode has computed itself so far."""
        return int(client.metrics(self.decode.url).get(COMPUTED, 0))


@dataclass
class Row:
    """A line of the table. recomputed: prompt tokens that decode computed although an offer came with them;
    the last one of each prompt is not counted, it is always computed. wrong: what must not be."""

    mutation: Mutation
    status: int = 0
    names: list[str] = field(default_factory=list)
    recomputed: int | None = None
    tokens: str = "-"
    poisoned: bool = False
    wrong: list[str] = field(default_factory=list)


def attempt(scene: Scene, mutation: Mutation, rng: random.Random) -> Row:
    """Try a mutation out, with fresh prompts."""
    row = Row(mutation)
    prompts = prompts_of(mutation.prompts, rng)
    salts = [mutation.salts[number % len(mutation.salts)] for number in range(len(prompts))]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        truths = [pool.submit(scene.truth, prompt, TOKENS) for prompt in prompts]
        offers = list(pool.map(scene.offer, mutation.servers, prompts, salts))
        for truth in truths:
            truth.result()
    changed = mutation.change(deepcopy(offers), rng)
    asked = salts[0] if mutation.asked_salt == "same" else mutation.asked_salt
    _send(scene, row, prompts[: 1 + mutation.batch], asked, changed)
    if mutation.kept:
        others = zip(mutation.prompts, prompts, salts, offers, strict=True)
        for kind, prompt, salt, offer in list(others)[1:]:
            if kind in OF_THEIR_OWN:
                _still_offered(scene, row, (prompt, salt), offer)
    again: list[Salted] = [(prompts[0], asked)]
    again += [one for one in zip(prompts, salts, strict=True) if one not in again]
    _ask_plainly(scene, row, again)
    return row


def _send(scene: Scene, row: Row, prompts: Sequence[list[int]], salt: str | None, params: object) -> None:
    scene.reports.new()
    before = scene.computed()
    try:
        answers = scene.ask(prompts, salt, params)
    except client.RequestError as error:
        row.status = error.status
        row.names = ["(by vLLM)"]
        if error.status not in REFUSED:
            row.wrong.append(f"HTTP {error.status}: {error.text[:200]}")
        return
    row.status = 200
    row.recomputed = max(0, scene.computed() - before - len(prompts))
    loads = scene.reports.new()
    row.names = sorted({_name(load) for load in loads if load.outcome != "loaded"})
    right = answers == [scene.truth(prompt, TOKENS) for prompt in prompts]
    row.tokens = "right" if right else "WRONG"
    if not right:
        row.wrong.append("wrong tokens")
    _judge(row, loads)


def _judge(row: Row, loads: list[Load]) -> None:
    """Whether as much was loaded as has to be, and no more."""
    loaded = [load for load in loads if load.outcome == "loaded"]
    if row.mutation.loads and (row.recomputed or row.names):
        row.wrong.append(f"{row.recomputed} tokens recomputed of an offer that is good")
    if row.mutation.forbidden and loaded:
        row.wrong.append("loaded across a cache salt")
    if row.mutation.batch and not loaded:
        row.wrong.append("the prompt that was offered did not load")
    if not row.names and not loaded and row.mutation.loads:
        row.wrong.append("nothing loaded")


def _name(load: Load) -> str:
    """Of a refusal: which check said no, and in which phase."""
    return f"{load.reason}{' (load)' if load.outcome == 'failed' else ''}"


def _still_offered(scene: Scene, row: Row, asked: Salted, offer: Params) -> None:
    """Another prompt's own offer, after somebody else was refused: it must load."""
    prompt, salt = asked
    scene.reports.new()
    (answer,) = scene.ask([prompt], salt, offer)
    if answer != scene.truth(prompt, TOKENS):
        row.wrong.append("wrong tokens for the other prompt")
    if {load.outcome for load in scene.reports.new()} != {"loaded"}:
        row.wrong.append("the other prompt's offer was used up")


def _ask_plainly(scene: Scene, row: Row, again: list[Salted]) -> None:
    """Each prompt once more without parameters: decode's prefix cache must have nothing wrong in it."""
    with ThreadPoolExecutor(len(again)) as pool:
        answers = list(pool.map(lambda one: scene.ask([one[0]], one[1]), again))
    row.poisoned = any(
        answer != [scene.truth(prompt, TOKENS)] for (prompt, _), answer in zip(again, answers, strict=True)
    )
    if row.poisoned:
        row.wrong.append("poisoned")


def prompts_of(kinds: Sequence[str], rng: random.Random) -> list[list[int]]:
    """Fresh prompts of random bytes. The others' kinds say how they relate to the first: "other" (as long),
    "other length", "shares" (two KV blocks, as long), "longer" (begins with it), "shorter" and "two
    blocks" (its beginning), "same"."""
    lengths = {"fresh": rng.randrange(*LENGTHS), "whole blocks": 3 * BLOCK_TOKENS, "short": 2}
    first = _bytes(lengths[kinds[0]], rng)
    made = [first]
    for kind in kinds[1:]:
        rest = _bytes(len(first), rng)
        made.append(
            {
                "other": rest,
                "other length": rest[: len(first) - BLOCK_TOKENS],
                "shares": first[: 2 * BLOCK_TOKENS] + rest[2 * BLOCK_TOKENS :],
                "longer": first + rest[: BLOCK_TOKENS + 5],
                "two blocks": first[: 2 * BLOCK_TOKENS],
                "shorter": first[: len(first) - BLOCK_TOKENS],
                "same": first,
            }[kind]
        )
    return made


def _bytes(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 256) for _ in range(length)]


def _salt(salt: str | None) -> dict[str, object]:
    return {} if salt is None else {"cache_salt": salt}
