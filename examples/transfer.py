"""Two processes, one transfer: the owner grants pages, the reader reads and checks them.

python examples/transfer.py
"""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

import kvik

LAYOUT = kvik.Layout(pages=64, run_bytes=16 * 1024, layers=4)  # 4 MiB


def own(pipe: Connection) -> None:
    """Fill pages, grant some of them, and keep them until the reader is done."""
    with kvik.Engine() as engine:
        region = engine.allocate(LAYOUT.nbytes)
        kv = np.frombuffer(memoryview(region), np.uint8).reshape(4, 64, -1)
        kv[:] = np.arange(64, dtype=np.uint8)[None, :, None]
        grant = engine.grant(region.pages(LAYOUT, [7, 8, 9, 40]))
        pipe.send(str(grant.ticket))
        print("owner: the grant is", grant.wait(30))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    pipe, end = multiprocessing.Pipe()
    owner = multiprocessing.Process(target=own, args=(end,))
    owner.start()
    end.close()  # only the owner has it now: its end is heard
    with kvik.Engine() as engine:
        memory = np.zeros((4, 64, 16 * 1024), np.uint8)
        target = engine.register(memory).pages(LAYOUT, range(4))
        try:
            ticket = pipe.recv()
        except EOFError:
            raise SystemExit("the owner has ended, and granted nothing") from None
        report = engine.read(target, ticket).wait()
        if not (memory[:, :4] == np.array([7, 8, 9, 40], np.uint8)[None, :, None]).all():
            raise SystemExit("the pages differ")
        print(f"reader: {report.bytes} bytes by {report.mechanism}, checked: {', '.join(report.checks)}")
    owner.join(30)
