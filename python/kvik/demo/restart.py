"""The second act: an engine is started again, and finds in a store what it had computed before.

A cold prompt is computed, and put into the store by the way; the engine is stopped and started again, with
nothing in its memory; the same prompt is asked again. It is good when both answers have the same tokens, and
all whole blocks of the prompt came from the store.
"""

import time
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from kvik.demo import client, words
from kvik.demo.measure import TOKENS, prompt_of
from kvik.demo.scene import KvFacts, StoreAct
from kvik.roles.processes import HttpServer, ProcessError

PUT_LIMIT = 60.0  # seconds until the store has what it was given; nobody waits for that but the demo
LOOK = 0.01
PROMPT = 1_000_000  # its number: no other prompt of the demo begins like it
BLOCKS = 'kvik_emulator_store_blocks_total{{result="{}"}}'
SECONDS = "kvik_emulator_store_load_seconds_sum"


@dataclass(frozen=True)
class Restarted:
    """The two answers, and what came from the store. `seconds`: of a rank's load on average."""

    length: int
    blocks: int
    cold: client.Completion
    warm: client.Completion
    hit: int
    nbytes: int
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether both answers have the same tokens, all of them."""
        return self.cold.tokens == self.warm.tokens and len(self.warm.tokens) == TOKENS

    @property
    def good(self) -> bool:
        """What the exit status hangs on."""
        return self.equal and self.hit == self.blocks


def run(act: StoreAct, kv: KvFacts, model: str) -> Restarted:
    """Ask, start anew, ask again.

    Raises `ProcessError`, `client.RequestError` and `OSError`.
    """
    length, ranks = act.length, act.ranks
    prompt = prompt_of(kv, length, PROMPT)
    # At least the last token is computed, to choose the next one.
    blocks = (length - 1) // kv.block_tokens
    engine = act.start()
    cold = client.complete(engine.url, prompt, TOKENS, model=model)
    _wait_put(engine, ranks * (length // kv.block_tokens))
    act.stop(engine)
    engine = act.start()
    warm = client.complete(engine.url, prompt, TOKENS, model=model)
    counted = client.metrics(engine.url)
    hit = int(counted[BLOCKS.format("hit")])
    return Restarted(length, blocks, cold, warm, hit, hit * kv.block_bytes, counted[SECONDS] / ranks)


def _wait_put(engine: HttpServer, count: int) -> None:
    """Wait until the store has so many blocks of all ranks; `ProcessError` when it does not get them."""
    until = time.monotonic() + PUT_LIMIT
    while True:
        counted = client.metrics(engine.url)
        done = sum(counted[BLOCKS.format(result)] for result in ("put", "known"))
        if done >= count:
            return
        if time.monotonic() > until:
            raise ProcessError(
                f"the store has {done:.0f} of {count} blocks after {PUT_LIMIT:g} s\n{engine.tail()}"
            )
        time.sleep(LOOK)  # a counter has no event to wait for


def tell(found: Restarted, where: str, console: Console) -> None:
    """The table of both starts, and the verdict."""
    console.print("\nAn engine started again, and its prefix from a store that outlived it", style="bold")
    console.print(
        f"One prompt of {found.length:,} tokens, asked twice; the engine was stopped in between, and has "
        f"nothing of its own any more. The store is `kvik store serve`, {where}.",
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("engine", no_wrap=True)
    table.add_column("its KV", no_wrap=True)
    for header in ("KV\nread", "read\nin", "\nTTFT"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("output\ntokens", no_wrap=True)
    table.add_row("first start", "computed", "-", "-", words.duration(found.cold.ttft), "-")
    verdict = "[green]equal[/]" if found.equal else "[bold red]DIFFERENT[/]"
    read = (words.size(found.nbytes), words.duration(found.seconds)) if found.hit else ("-", "-")
    table.add_row("started again", f"{found.hit} of {found.blocks} blocks: store", *read,
                  words.duration(found.warm.ttft), verdict)  # fmt: skip
    console.print(table)
    if found.good:
        console.print("The same tokens, and all whole blocks from the store.", style="bold green")
    elif not found.equal:
        console.print("The tokens differ: the KV was not the right one.", style="bold red")
    else:
        console.print("KV is missing in the store; the engine computed it again.", style="bold red")
