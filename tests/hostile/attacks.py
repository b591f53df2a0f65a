"""What a peer that misbehaves does. An attack takes the victim's address and a dose, and says how it went.

It raises AssertionError when the engine did not defend itself as the docs say.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.hostile import wire

ATTEMPT = 3.0  # seconds that an engine gives a handshake
SLACK = 2.0


@dataclass(frozen=True)
class Dose:
    """How much of an attack."""

    connections: int
    tickets: int
    seconds: float
    seed: int


SMALL = Dose(connections=300, tickets=20_000, seconds=2.0, seed=1)
FULL = Dose(connections=1000, tickets=1_000_000, seconds=10.0, seed=1)


def half_open(to: tuple[str, int], dose: Dose) -> str:
    """Connections that never say a word."""
    with _many(to, dose.connections) as conns:
        # A newcomer takes the place of one that is silent; it does not wait until the time of one is over.
        let_in = _let_in(to)
        left = _wait_for_cuts(conns, ATTEMPT + SLACK)
    assert left == 0, f"{left} connections that said nothing were still open"
    return f"{dose.connections} connections, all cut; a newcomer was let in after {let_in:.1f} s"


def slow_drip(to: tuple[str, int], dose: Dose) -> str:
    """A handshake of which one byte comes a second."""
    first = wire.hello()
    with _many(to, min(dose.connections, 200)) as conns:
        end = time.monotonic() + ATTEMPT + SLACK
        at = 0
        while conns and time.monotonic() < end:
            for conn in list(conns):
                try:
                    conn.send(first[at : at + 1])
                except OSError:
                    conns.remove(conn)
            at += 1
            _wait_for_cuts(conns, 1.0)
        assert not conns, f"{len(conns)} handshakes still drip after {ATTEMPT + SLACK} s"
    return f"{at} bytes a connection, then cut"


def huge_frame(to: tuple[str, int], _: Dose) -> str:
    """Frames that claim 2^32 - 1 bytes, and 2^63 where a header has room: as kinds, greetings and chunks."""
    cut = 0
    for claim in (wire.frame_header(2**32 - 1, wire.BEGIN), struct.pack("<Q", 2**63), b"\xff" * 12):
        session = wire.connect(to)
        session.send(claim + bytes(1 << 16))
        cut += session.over()
        session.conn.close()
    greetings = (b"kvik\x01\0\xff\xff", b"kvik" + b"\xff" * 60, struct.pack("<4sQ", b"kvik", 2**63))
    for claim in greetings:
        with socket.create_connection(to, wire.PATIENCE) as conn:
            conn.sendall(claim)
            cut += _wait_for_cuts([conn], ATTEMPT + SLACK) == 0
    cut += _huge_chunk(to)
    assert cut == 7, f"{cut} of 7 were cut off"
    return "7 of 7 cut off"


def _huge_chunk(to: tuple[str, int]) -> bool:
    session = wire.connect(to)
    channel = session.join(0)
    assert channel is not None, "a channel was not let in"
    channel.sendall(b"kvD1" + b"\xff" * 36 + bytes(1 << 16))
    cut = _wait_for_cuts([channel], ATTEMPT) == 0
    channel.close()
    session.conn.close()
    return cut


def many_tickets(to: tuple[str, int], dose: Dose) -> str:
    """Requests for grants that never were, by a peer that answers everything."""
    sent, cut = _flood(to, dose.tickets, answers=True, seed=dose.seed)
    assert not cut, f"a peer that answers was cut off after {sent} requests"
    return f"{sent:,} requests refused or held, none served"


def unanswered(to: tuple[str, int], dose: Dose) -> str:
    """The same by a peer that never answers an end, which it must."""
    sent, cut = _flood(to, dose.tickets, answers=False, seed=dose.seed)
    assert cut or dose.tickets < 1 << 17, f"{sent} ends were left unanswered, and the peer was not cut off"
    return f"{'cut off' if cut else 'borne'} after {sent:,} requests"


def _flood(to: tuple[str, int], count: int, *, answers: bool, seed: int) -> tuple[int, bool]:
    session, die, sent = wire.connect(to), random.Random(seed), 0
    try:
        for first in range(2, 2 * count + 2, 1000):
            batch = []
            for transfer in range(first, min(first + 1000, 2 * count + 2), 2):
                batch.append(wire.begin(transfer, die.randbytes(16)))
                if answers:
                    batch.append(wire.frame(wire.ENDED, struct.pack("<Q", transfer)))
            if not session.send(b"".join(batch)) or session.drain() < 0:
                return sent, True
            sent += len(batch) // (2 if answers else 1)
        # What was sent has been dealt with once the last of it is answered.
        time.sleep(0.2)
        return sent, session.drain() < 0
    finally:
        session.conn.close()


def never_reads(to: tuple[str, int], dose: Dose) -> str:
    """A peer that asks and never reads the answers: what waits for it is bounded."""
    session, die = wire.connect(to), random.Random(dose.seed)
    session.conn.setblocking(False)
    sent, transfer, rest = 0, 2, b""
    end = time.monotonic() + 2 * dose.seconds
    try:
        while time.monotonic() < end and sent < 4 * dose.tickets:
            if not rest:
                rest = b"".join(wire.begin(transfer + 2 * at, die.randbytes(16)) for at in range(500))
                transfer, sent = transfer + 1000, sent + 500
            try:
                rest = rest[session.conn.send(rest) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return f"cut off after {sent:,} requests"
        return f"{sent:,} requests, borne"
    finally:
        session.conn.close()


def many_sessions(to: tuple[str, int], dose: Dose) -> str:
    """As many engines as are let in, each with requests that wait."""
    sessions, why = [], "all were let in"
    try:
        # A handshake in Python is slow: fewer of them where there is little time.
        for _ in range(min(dose.connections, dose.tickets // 100)):
            try:
                sessions.append(wire.connect(to))
            except OSError as error:
                why = f"then: {str(error)[:60]}"
                break
            sessions[-1].send(b"".join(wire.begin(2 * at, os.urandom(16)) for at in range(1, 50)))
        time.sleep(dose.seconds / 2)
        return f"{len(sessions)} sessions, {why}"
    finally:
        for session in sessions:
            session.conn.close()


def garbage(to: tuple[str, int], dose: Dose) -> str:
    """Random bytes, other protocols, and a handshake that is cut at every byte."""
    die, first = random.Random(dose.seed), wire.hello()
    said = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0", b"SSH-2.0-x\r\n", b"kvik", b"kvik\x09\0\0\0"]
    said += [die.randbytes(die.randrange(1, 4000)) for _ in range(dose.connections // 2)]
    said += [first[:at] for at in range(1, len(first))]
    for text in said:
        with contextlib.suppress(OSError), socket.create_connection(to, wire.PATIENCE) as conn:
            conn.sendall(text)
            conn.shutdown(socket.SHUT_WR)
            while conn.recv(4096):
                pass
    return f"{len(said)} strangers"


def garbage_frames(to: tuple[str, int], dose: Dose) -> str:
    """An admitted peer's random frames: each is cut off, and the next one comes."""
    die, end, count = random.Random(dose.seed), time.monotonic() + dose.seconds, 0
    while time.monotonic() < end:
        session = wire.connect(to)
        for _ in range(die.randrange(1, 20)):
            body = die.randbytes(die.randrange(0, 200))
            if not session.send(wire.frame(die.randrange(0, 12), body)):
                break
        session.conn.close()
        count += 1
    return f"{count} sessions"


def unix_strangers(to: tuple[str, int], dose: Dose) -> str:
    """Connections to the engine's UNIX sockets that say nothing, or garbage, with descriptors."""
    session, die, came = wire.connect(to), random.Random(dose.seed), 0
    name = session.local_name
    conns: list[socket.socket] = []
    try:
        for _ in range(dose.connections):
            conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            conn.setblocking(False)
            conns.append(conn)
            try:
                conn.connect(f"\0{name}")
            except OSError:
                time.sleep(0.001)  # its queue is full, as it should be
                continue
            came += 1
            with contextlib.suppress(OSError):
                if die.random() < 0.5:
                    socket.send_fds(conn, [die.randbytes(die.randrange(1, 200))], [conn.fileno()])
        time.sleep(min(dose.seconds, ATTEMPT))
    finally:
        for conn in [*conns, session.conn]:
            conn.close()
    assert came > 0, "nobody came through"
    return f"{came} of {dose.connections} came in"


def idle_channels(to: tuple[str, int], dose: Dose) -> str:
    """Sessions with every channel that they may have, none of which is ever used."""
    sessions, channels, refused = [], [], 0
    try:
        for _ in range(min(dose.connections // 64, 8)):
            session = wire.connect(to)
            sessions.append(session)
            for index in range(66):
                channel = session.join(index)
                if channel is None:
                    refused += 1
                else:
                    channels.append(channel)
        end = time.monotonic() + dose.seconds
        while time.monotonic() < end:
            for session in sessions:
                session.send(wire.frame(wire.BEAT))
            time.sleep(0.3)
        assert refused == 2 * len(sessions), f"{refused} channels beyond 64 a session were refused"
        return f"{len(channels)} channels, {refused} more refused"
    finally:
        for conn in [*channels, *(session.conn for session in sessions)]:
            conn.close()


def stray_chunks(to: tuple[str, int], dose: Dose) -> str:
    """Chunks of 4 MiB for transfers that never were: what comes is thrown away, as long as it comes."""
    session = wire.connect(to)
    channels = [channel for index in range(8) if (channel := session.join(index)) is not None]
    try:
        end, sent, length = time.monotonic() + dose.seconds, 0, 4 << 20
        owed = dict.fromkeys(channels, b"")
        for channel in channels:
            channel.setblocking(False)
        while time.monotonic() < end:
            for channel in channels:
                if not owed[channel]:
                    owed[channel] = wire.chunk(session.number, 7, 0, length) + bytes(length) + wire.WHOLE
                with contextlib.suppress(BlockingIOError):
                    moved = channel.send(owed[channel])
                    owed[channel], sent = owed[channel][moved:], sent + moved
            session.send(wire.frame(wire.BEAT))
            session.drain()
            time.sleep(0.002)
        return f"{len(channels)} channels, {sent >> 20} MiB thrown away"
    finally:
        for conn in [*channels, session.conn]:
            conn.close()


ATTACKS: dict[str, Callable[[tuple[str, int], Dose], str]] = {
    "half-open": half_open,
    "slow-drip": slow_drip,
    "huge-frame": huge_frame,
    "million-tickets": many_tickets,
    "ends-unanswered": unanswered,
    "never-reads": never_reads,
    "many-sessions": many_sessions,
    "garbage": garbage,
    "garbage-frames": garbage_frames,
    "unix-strangers": unix_strangers,
    "idle-channels": idle_channels,
    "stray-chunks": stray_chunks,
}


@contextlib.contextmanager
def _many(to: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    conns = [socket.create_connection(to, wire.PATIENCE) for _ in range(count)]
    every = list(conns)
    try:
        yield conns
    finally:
        for conn in every:
            conn.close()


def _wait_for_cuts(conns: list[socket.socket], seconds: float) -> int:
    """Takes those out that the engine ends within that time; how many are left."""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for each in conns:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ, each)
        while conns and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                conn: socket.socket = key.data
                with contextlib.suppress(BlockingIOError):
                    try:
                        over = not conn.recv(4096)
                    except ConnectionError:
                        over = True
                    if over:
                        selector.unregister(conn)
                        conns.remove(conn)
    return len(conns)


def _let_in(to: tuple[str, int]) -> float:
    began = time.monotonic()
    wire.connect(to).conn.close()
    took = time.monotonic() - began
    assert took < ATTEMPT / 2, f"a newcomer waited for {took:.1f} s"
    return took
