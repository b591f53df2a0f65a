"""A handover between servers in two processes whose KV lies on a GPU."""

import dataclasses
from typing import Any

from kvik.handover.protocol import KvShape
from tests.python.gpu import Cuda, alone, driver
from tests.python.gpu_handover import check_order, hand_over, small
from tests.python.peers import Peer, Pipe


def prefill(pipe: Pipe, *, transport: str) -> None:
    """The prefill server's process: it obeys `give`, `step` and `bye`."""
    side = small(driver(), "prefill", transport)
    pipe.say(shape=dataclasses.asdict(side.shape))
    while (heard := pipe.hear())["do"] != "bye":
        if heard["do"] == "give":
            pipe.say(params=side.give(heard["number"], heard["blocks"], heard["then"]))
        else:
            side.step()
            pipe.say()
    side.close()


class Elsewhere:
    """The prefill server of another process."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        told = peer.hear()["shape"]
        self.shape = KvShape(**told | {"stages": tuple(told["stages"])})

    def give(self, number: int, blocks: list[int], then: tuple[int, int] | None = None) -> dict[str, Any]:
        """As of `GpuSide`."""
        params: dict[str, Any] = self.peer.ask(do="give", number=number, blocks=blocks, then=then)["params"]
        return params

    def step(self) -> object:
        """As of `GpuSide`."""
        return self.peer.ask(do="step")


def between(cuda: Cuda, transport: str) -> None:
    with Peer(prefill, transport=transport) as peer:
        server, decode = Elsewhere(peer), small(cuda, "decode", transport)
        for number in (10, 11):  # other prompts than those of `check_order`
            hand_over(server, decode, number)
        check_order(cuda, server, decode)
        decode.close()
        peer.say(do="bye")
        assert peer.end() == 0


@alone
def test_kv_goes_to_another_process_by_local(cuda: Cuda) -> None:
    """Each byte arrives, no other one changes, and the streams of both engines are waited for."""
    between(cuda, "local")


@alone
def test_kv_goes_to_another_process_by_tcp(cuda: Cuda) -> None:
    between(cuda, "tcp")
