"""Cables and modules: their memory as the standards lay it out, the ioctls, and what a slow one costs."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import json
import os
import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from kvik.doctor import ethtool, examine, findings, live
from kvik.doctor.cables import CableError, read_link, read_module, without_serial
from kvik.doctor.model import Cable, Machine
from kvik.doctor.saving import save
from kvik.doctor.show import machine_lines
from kvik.doctor.tree import RecordedTree, Unread
from tests.python.doctor.machines import recorded
from tests.python.doctor.machines.modules import SERIAL, cmis, link_settings, qsfp, sfp
from tests.python.doctor.small import examined
from tests.python.peers import random_seed

MODULE = "/ioctl/ethtool/ens1np0/module"


@pytest.mark.parametrize(
    ("memory", "form", "technology", "metres", "rate"),
    [
        (sfp(), "SFP", "passive copper", 3.0, 25),
        (sfp(code=0, mbd=10_300, copper=8, metres=5), "SFP", "active copper", 5.0, 10),
        (sfp(code=0, mbd=10_300, copper=0, metres=30), "SFP", "optical", None, 10),
        (sfp(code=0x40, mbd=26_500, encoding=8), "SFP", "passive copper", 3.0, 50),
        (sfp(code=0, mbd=0), "SFP", "passive copper", 3.0, None),
        (qsfp(), "QSFP28", "passive copper", 2.0, 100),
        (qsfp(code=0, mbd=10_300, ethernet=8, kind=0x0D), "QSFP+", "passive copper", 2.0, 40),
        (qsfp(code=0x02, technology=0, metres=50, connector=0x0C), "QSFP28", "optical", None, 100),
        (qsfp(code=0x01, technology=0, metres=10), "QSFP28", "optical", 10.0, 100),
        (qsfp(code=0, mbd=25_750), "QSFP28", "passive copper", 2.0, 100),
        (qsfp(code=0, mbd=14_000, infiniband=1 << 3), "QSFP28", "passive copper", 2.0, 56),
        (qsfp(code=0x40, mbd=26_500, encoding=8, technology=0xC), "QSFP28", "active copper", 2.0, 200),
        (qsfp(code=0, mbd=53_000, encoding=8), "QSFP28", "passive copper", 2.0, 400),
        (qsfp(code=0, mbd=0), "QSFP28", "passive copper", 2.0, None),
        (cmis(), "OSFP", "passive copper", 1.5, 400),
        (cmis((0x0F, 0x11), technology=0, length=0, kind=0x18), "QSFP-DD", "optical", None, 400),
        (cmis((0x31, 0x32), technology=0xF, length=0x43, kind=0x1E), "QSFP", "active copper", 3.0, 400),
        (cmis((0x51,), length=0xC2), "OSFP", "passive copper", 200.0, 800),
        (cmis(()), "OSFP", "passive copper", 1.5, None),
        (cmis((0xEE,)), "OSFP", "passive copper", 1.5, None),
    ],
)  # fmt: skip
def test_a_module_is_what_its_memory_says(
    memory: bytes, form: str, technology: str, metres: float | None, rate: int | None
) -> None:
    part = {"SFP": "SFP-PART", "QSFP28": "QSFP-PART", "QSFP+": "QSFP-PART"}.get(form, "OSFP-PART")
    assert read_module(memory) == Cable(form, "A maker", part, technology, metres, rate)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (b"", "kind that is not known here"),
        (b"\x02" + bytes(255), "kind that is not known here (0x02"),
        (sfp()[:95], "95 bytes of 96"),
        (qsfp()[:128], "128 bytes of 256"),
        (cmis()[:255], "255 bytes of 256"),
        (bytes([0x11]) + b"\xff" * 255, "sum is wrong"),
        (sfp()[:20] + b"a" + sfp()[21:], "sum is wrong: byte 63"),
        (qsfp()[:148] + b"a" + qsfp()[149:], "sum is wrong: byte 191"),
        (cmis()[:129] + b"a" + cmis()[130:], "sum is wrong: byte 222"),
    ],
)
def test_memory_that_cannot_be_understood_says_why(memory: bytes, said: str) -> None:
    with pytest.raises(CableError) as error:
        read_module(memory)
    assert said in str(error.value)


def test_no_memory_makes_it_fail() -> None:
    draw = random.Random(random_seed())
    for _ in range(500):
        memory = bytearray(draw.choice([sfp(), qsfp(), cmis(), draw.randbytes(256)]))
        for _ in range(draw.randrange(4)):
            memory[draw.randrange(len(memory))] = draw.randrange(256)
        cut = bytes(memory[: draw.choice([0, 1, 64, 96, 128, 256])])
        with suppress(CableError):
            assert read_module(cut).form
        assert len(without_serial(cut)) == len(cut)
        read_link(cut)


@pytest.mark.parametrize("memory", [sfp(), qsfp(), cmis(), b"\x02" + SERIAL * 15])
def test_serial_numbers_are_not_kept(memory: bytes) -> None:
    kept = without_serial(memory)
    assert SERIAL[:12] in memory
    assert SERIAL[:12] not in kept
    assert b"261125" not in kept
    assert without_serial(kept) == kept
    if memory[0] != 2:
        assert read_module(kept) == read_module(memory)


def test_a_wrong_sum_stays_wrong_in_a_recording() -> None:
    wrong = bytearray(cmis())
    wrong[222] ^= 0x10
    with pytest.raises(CableError, match="sum is wrong"):
        read_module(without_serial(bytes(wrong)))


def test_link_settings_say_what_both_ends_can() -> None:
    settings = read_link(link_settings(supported=(12, 38, 66), partner=(12, 38), port=5))
    assert settings is not None
    assert (settings.port, settings.able_mbits, settings.partner_mbits) == ("direct attach", 200_000, 100_000)
    silent = read_link(link_settings(supported=(6, 13), port=0xFF))
    assert silent is not None
    assert (silent.port, silent.able_mbits, silent.partner_mbits) == (None, None, None)
    for said in (b"", bytes(48), bytes(96), link_settings((12,))[:-1]):
        assert read_link(said) is None


def nets(machine: Machine) -> dict[str, Cable | None]:
    return {net.name: net.cable for net in machine.nets}


def test_a_cable_of_the_ports_rate_is_shown_and_is_no_fault() -> None:
    machine = examined(recorded("two-sockets-8x8"))
    assert findings(machine) == []
    text = "\n".join(machine_lines(machine))
    said = "direct attach, can 400 Gbit/s, partner offers 400 Gbit/s, OSFP A maker OSFP-PART"
    assert f"port      ens0np0: {said}, passive copper 1.5 m, 400 Gbit/s" in text


def test_a_slow_module_is_told_with_both_rates() -> None:
    (finding,) = findings(examined(recorded("two-sockets-8x8", "slow-module")))
    assert finding.device == "mlx5_0"
    assert finding.fact == ("the OSFP in ens0np0 (A maker OSFP-PART) is for 200 Gbit/s, and the port can 400")
    assert (finding.cost.percent, finding.cost.gbs_now, finding.cost.gbs_could) == (50.0, 25.0, 50.0)


@pytest.mark.parametrize(("name", "said"), [("module", "sum is wrong"), ("link", "3 bytes, which are no")])
def test_what_is_not_understood_is_named_and_no_fault(name: str, said: str) -> None:
    document = recorded("roce-pair-left")
    path = f"/ioctl/ethtool/ens1np0/{name}"
    wrong = b"\x11\0\0" + b"\xff" * 253 * (name == "module")
    document["binary"][path] = base64.b64encode(wrong).decode()
    machine = examined(document)
    assert findings(machine) == []
    assert said in {one.path: one.reason for one in machine.unread}[path]


def test_what_was_not_read_is_named() -> None:
    document = recorded("roce-pair-left")
    del document["binary"][MODULE]
    document["unread"] = {MODULE: "not permitted"}
    machine = examined(document)
    assert nets(machine) == {"ens1np0": None}
    assert {one.path: one.reason for one in machine.unread}[MODULE] == "not permitted"
    assert "cable not read" in "\n".join(machine_lines(machine))


def test_a_recording_has_the_cable_and_not_its_serial_number() -> None:
    document = recorded("roce-pair-left", "slow-module")
    saved = save(RecordedTree(document), "a machine", "host")
    assert nets(examined(saved)) == nets(examined(document))
    assert SERIAL[:12] not in RecordedTree(saved).blob(MODULE)
    assert [one.code for one in findings(examined(json.loads(json.dumps(saved))))] == ["module-slow"]


class Kernel:
    """The kernel's side of SIOCETHTOOL for one port: it reads and writes where `struct ifreq` points."""

    def __init__(self, memory: bytes, settings: bytes) -> None:
        self.memory, self.settings = memory, settings

    def ioctl(self, _: object, number: int, request: bytes) -> None:
        name, at = struct.unpack("=16sQ16x", request)
        assert (number, name.rstrip(b"\0")) == (0x8946, b"ens1np0")
        (command,) = struct.unpack("=I", ctypes.string_at(at, 4))
        answer = {0x42: self.info, 0x43: self.eeprom, 0x4C: self.link}[command](at)
        ctypes.memmove(at, answer, len(answer))

    def info(self, _: int) -> bytes:
        return struct.pack("=3I", 0x42, 0x3, len(self.memory))

    def eeprom(self, at: int) -> bytes:
        _, _, offset, length = struct.unpack("=4I", ctypes.string_at(at, 16))
        assert offset + length <= len(self.memory)
        return ctypes.string_at(at, 16) + self.memory[offset:][:length]

    def link(self, at: int) -> bytes:
        (asked,) = struct.unpack("=b", ctypes.string_at(at + 15, 1))
        words = self.settings[15]
        if asked != words:
            return struct.pack("=I11xb", 0x4C, -words)
        return self.settings


def test_the_ioctls_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = link_settings((38, 66), (38,), words=3)
    kernel = Kernel(qsfp() + bytes(384), settings)
    monkeypatch.setattr(fcntl, "ioctl", kernel.ioctl)
    assert ethtool.module("ens1np0") == qsfp()
    assert ethtool.link("ens1np0") == settings
    tree = live()
    assert tree.blob("/ioctl/ethtool/ens1np0/module") == qsfp()
    with pytest.raises(Unread, match="not asked for"):
        live(cables=False).blob("/ioctl/ethtool/ens1np0/module")


def test_this_kernel_answers_for_each_of_this_hosts_ports() -> None:
    """Bytes, or the kernel's own words."""
    for name in ("lo", "none0", "x" * 40):
        for what in ("link", "module"):
            with pytest.raises(Unread) as error:
                live().blob(f"/ioctl/ethtool/{name}/{what}")
            assert error.value.reason not in ("", "absent", "not a file")
    machine = examine(live())
    named = {one.path: one.reason for one in machine.unread}
    for net in Path("/sys/class/net").iterdir():
        if not (net / "device").exists():
            continue
        path = f"/ioctl/ethtool/{net.name}"
        assert nets(machine)[net.name] is not None or named[f"{path}/module"]
        if f"{path}/link" not in named:
            assert read_link(live().blob(f"{path}/link")) is not None
        if os.geteuid() == 0 and nets(machine)[net.name] is None:
            assert named[f"{path}/module"] != "not permitted"
