"""What the emulator's answers prove: any wrong byte of KV changes the digest; ranks and pages do not."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvik.emulator.content import KvFunction, Words, chain_of, root_of
from kvik.emulator.scheduler import weigh_ranks
from kvik.emulator.tokens import EOS, FIRST_BYTE_TOKEN, Detokenizer, encode, next_token
from kvik.shapes import ModelShape

SEED = 20_201
SMALL = ModelShape(name="small", layers=2, kv_heads=2, head_size=2, dtype="float32", vocab_size=512)
GQA = ModelShape(name="gqa", layers=5, kv_heads=4, head_size=32, dtype="bfloat16", vocab_size=32_000)
MLA = ModelShape(
    name="mla", layers=3, kv_heads=1, head_size=96, attention="mla", dtype="bfloat16", vocab_size=32_000
)


@dataclass
class Store:
    """The memories of all ranks of a model, and one request in them."""

    shape: ModelShape
    tp: int
    page_tokens: int
    pages: list[int]
    count: int

    def __post_init__(self) -> None:
        heads = [self.shape.heads_of_rank(self.tp, rank) for rank in range(self.tp)]
        words = self.shape.content * self.shape.element_bytes // 8
        self.functions = [KvFunction(self.shape.layers, list(held), words) for held in heads]
        noise = np.random.default_rng(SEED)
        self.memories: list[Words] = [
            noise.integers(
                2**64,
                size=(self.shape.layers, self.count, len(held), self.page_tokens, words),
                dtype=np.uint64,
            )
            for held in heads
        ]
        self.weigh = weigh_ranks(heads)

    def numbers(self, first: int, last: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
        chosen = self.pages[first // self.page_tokens : -(-last // self.page_tokens)]
        return np.array(chosen, dtype=np.uint32)

    def fill(self, tokens: list[int], cuts: list[int], salt: str | None = None) -> None:
        """Write the KV of some tokens, piece by piece as chunks of a prefill are."""
        root = root_of(self.shape.name, salt)
        running = 0
        for first, last in itertools.pairwise([0, *cuts, len(tokens)]):
            piece = np.array(tokens[first:last], dtype=np.uint32)
            chain, running = chain_of(root, piece, first, running)
            for function, memory in zip(self.functions, self.memories, strict=True):
                function.fill(memory, self.numbers(first, last), first, chain)

    def digest(self, tokens: int, cuts: tuple[int, ...] = ()) -> int:
        """What reading the first `tokens` tokens gives, in as many pieces as asked for."""
        sums = [0] * self.tp
        for first, last in itertools.pairwise([0, *cuts, tokens]):
            for rank, (function, memory) in enumerate(zip(self.functions, self.memories, strict=True)):
                sums[rank] += function.read(memory, self.numbers(first, last), first, last)
        return self.weigh([one % 2**64 for one in sums])


def store(shape: ModelShape, tokens: list[int], tp: int = 1, page_tokens: int = 4, seed: int = 0) -> Store:
    """A request whose pages lie anywhere, filled in pieces of random sizes."""
    rng = random.Random(seed)
    needed = -(-len(tokens) // page_tokens)
    made = Store(shape, tp, page_tokens, rng.sample(range(needed + 5), needed), needed + 5)
    made.fill(tokens, sorted(rng.sample(range(1, len(tokens)), min(3, len(tokens) - 1))))
    return made


def prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def test_every_byte_counts_and_no_other() -> None:
    """Exhaustively, on a small shape: each valid byte, and each byte beyond the last token."""
    tokens = prompt(10, SEED)
    made = store(SMALL, tokens)
    truth = made.digest(len(tokens))
    memory = made.memories[0]
    raw = memory.view(np.uint8)
    valid = np.zeros(memory.shape, dtype=bool)
    for position in range(len(tokens)):
        valid[:, made.pages[position // 4], :, position % 4] = True
    valid_bytes = valid.repeat(8, axis=-1)
    for place in np.ndindex(*raw.shape):
        kept = raw[place]
        raw[place] = kept ^ np.uint8(1 << (sum(place) % 8))
        assert (made.digest(len(tokens)) != truth) == valid_bytes[place], place
        raw[place] = kept
    assert made.digest(len(tokens)) == truth


@pytest.mark.parametrize("axis", ["layers", "pages", "heads", "slots", "words"])
def test_any_two_traded_are_seen(axis: str) -> None:
    """Exhaustively, on a small shape of full pages: any two layers, pages, heads, slots, words."""
    tokens = prompt(12, SEED + 1)
    made = store(SMALL, tokens)
    truth = made.digest(len(tokens))
    memory = made.memories[0]
    number = ["layers", "pages", "heads", "slots", "words"].index(axis)
    choices = made.pages if axis == "pages" else range(memory.shape[number])
    seen = 0
    for one, other in itertools.combinations(choices, 2):
        places = np.moveaxis(memory, number, 0)
        places[[one, other]] = places[[other, one]]
        assert made.digest(len(tokens)) != truth, (one, other)
        places[[one, other]] = places[[other, one]]
        seen += 1
    assert seen > 0
    assert made.digest(len(tokens)) == truth


@pytest.mark.parametrize(("shape", "tp"), [(GQA, 1), (GQA, 4), (GQA, 8), (MLA, 2)])
def test_random_faults_on_larger_shapes(shape: ModelShape, tp: int) -> None:
    """Random bytes, swaps of random rows, and zeroed pages, on any rank: also one that holds a copy."""
    rng = random.Random(SEED)
    tokens = prompt(100, SEED, shape.vocab_size)
    made = store(shape, tokens, tp, page_tokens=16, seed=2)
    truth = made.digest(len(tokens))
    for _ in range(60):
        memory = made.memories[rng.randrange(tp)]
        before = memory.copy()
        layers, _, heads, _, _ = memory.shape

        def row(layers: int = layers, heads: int = heads) -> tuple[int, int, int, int]:
            position = rng.randrange(len(tokens))
            page = made.pages[position // 16]
            return rng.randrange(layers), page, rng.randrange(heads), position % 16

        kind = rng.choice(["flip", "swap", "zero"])
        one, other = row(), row()
        if kind == "flip":
            memory[one][rng.randrange(memory.shape[4])] ^= np.uint64(1 << rng.randrange(64))
        elif kind == "swap" and one != other:
            memory[one], memory[other] = memory[other].copy(), memory[one].copy()
        else:
            memory[one[0], one[1]] = 0
        assert made.digest(len(tokens)) != truth, (kind, one, other)
        memory[...] = before
    assert made.digest(len(tokens)) == truth


@pytest.mark.parametrize("shape", [GQA, MLA])
def test_independent_of_ranks_pages_and_pieces(shape: ModelShape) -> None:
    """The same tokens have one digest, however they are spread and in however many pieces they are read."""
    tokens = prompt(77, SEED, shape.vocab_size)
    truth = store(shape, tokens).digest(len(tokens))
    for number, (tp, page_tokens) in enumerate(itertools.product([1, 2, 4, 8], [1, 3, 16, 128])):
        made = store(shape, tokens, tp, page_tokens, seed=number)
        assert made.digest(len(tokens)) == truth, (tp, page_tokens)
        assert made.digest(len(tokens), cuts=(1, 40, 41)) == truth, (tp, page_tokens)


def test_depends_on_every_token_salt_and_shape() -> None:
    """One other token anywhere changes the KV of its own and of all later positions, and of none before."""
    tokens = prompt(20, SEED)
    base = store(GQA, tokens)
    for position in range(len(tokens)):
        other = list(tokens)
        other[position] += 1
        changed = store(GQA, other)
        for at in range(len(tokens)):
            where = (slice(None), base.pages[at // 4], slice(None), at % 4)
            same = base.memories[0][where] == changed.memories[0][where]
            assert same.all() if at < position else not same.any(), (position, at)
    salted = Store(GQA, 1, 4, base.pages, base.count)
    salted.fill(tokens, [], salt="pepper")
    assert salted.digest(20) != base.digest(20)
    assert root_of("a", "b") != root_of("ab", None)


def test_threads_change_nothing() -> None:
    """A span large enough to be shared by threads has the same bytes and the same digest."""
    rng = np.random.default_rng(SEED)
    chain = rng.integers(2**64, size=1024, dtype=np.uint64)
    pages = rng.permutation(64).astype(np.uint32)
    results = []
    for threads in (1, 3):
        function = KvFunction(8, [0, 1, 2, 3], 64, threads)
        memory = np.zeros((8, 64, 4, 16, 64), dtype=np.uint64)
        function.fill(memory, pages, 0, chain)
        results.append((memory, function.read(memory, pages, 0, 1024)))
    assert np.array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_next_token() -> None:
    """Never a special token but the end, which may come now and then; every other one may."""
    drawn = [next_token(digest * 0x9E37, 7, 512, may_end=True) for digest in range(40_000)]
    assert set(drawn) == {EOS, *range(FIRST_BYTE_TOKEN, 512)}
    assert 40_000 / 512 < drawn.count(EOS) < 40_000 / 128
    held = [next_token(digest * 0x9E37, 7, 512, may_end=False) for digest in range(40_000)]
    assert EOS not in held
    assert sum(one == other for one, other in zip(drawn, held, strict=True)) == 40_000 - drawn.count(EOS)


def test_text() -> None:
    """Text comes back as it was, also a character cut in two; every other token has a word of its own."""
    text = "Füße, 語"
    detokenizer = Detokenizer()
    assert "".join(detokenizer.add([token]) for token in encode(text)) == text
    words = {Detokenizer().add([token]) for token in range(259, 40_000)}
    assert len(words) == 40_000 - 259
