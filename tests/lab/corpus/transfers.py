"""Tables about moving bytes: sweeps over sizes, line rates, first requests, loads from storage."""

# ruff: noqa: RUF001 - headers are published in Japanese and Chinese too

from __future__ import annotations

from tests.lab.corpus.drafting import Draft, Maker, Slip, slips
from tests.lab.corpus.figures import Number, Style, clock
from tests.lab.corpus.layout import Cell, Heading, Table, cell, sentence

_COUNT = Style(exact=True, commas=True)


def sweep(m: Maker) -> Draft:
    """Blocks of several sizes moved in several numbers; bandwidth is size times count over time."""
    rows: list[tuple[Cell, ...]] = []
    line = m.between(11.0, 22.0)
    decimals = (2, 2, 3)[m.turn]
    for size in ((16, 64, 256), (4, 32, 128, 512), (64, 256, 1024))[m.turn]:
        for count in ((16, 128, 1024), (100, 1000), (32, 256, 2048))[m.turn]:
            block = m.given(size, Style(exact=True, unit="KiB"))
            number = m.given(count, _COUNT)
            total = size * 1024 * count
            ms = (m.between(0.02, 0.05) + total / line / 1e6 + count * m.between(0.0004, 0.001)) * m.noise(
                0.05
            )
            time = m.given(ms, Style(3))
            rate = m.product(
                Style(decimals, unit="GB/s"), (block, 1), (number, 1), (time, -1), scale=1024e3 / 1e9
            )
            rows.append((cell(block), cell(number), cell(time), cell(rate)))
    header = (
        m.pick("Block size", "ブロックサイズ", "块大小"),
        m.pick("Blocks", "ブロック数", "块数"),
        m.pick("Time (ms)", "転送時間 (ms)", "传输时间 (ms)"),
        m.pick("Bandwidth", "帯域幅", "带宽"),
    )
    title = m.pick("Transfer sweep, one peer", "転送サイズの掃引", "不同块大小的传输")
    return Draft((Heading(title), Table(header, tuple(rows))))


def line_rate(m: Maker) -> Draft:
    """Hosts with several adapters: the line rate is adapters times speed, with the shares of it."""
    rows: list[tuple[Cell, ...]] = []
    shares: list[Number] = []
    column: list[tuple[Number, float]] = []
    hosts = m.choose(6, ("host-a", "host-b", "host-c", "host-d", "host-e", "host-f", "host-g", "host-h"))
    for name, (nics, speed) in zip(
        hosts, ((4, 100), (8, 100), (8, 200), (16, 200), (8, 400), (16, 400)), strict=True
    ):
        adapters = m.given(nics, Style(exact=True))
        gbit = m.given(speed, Style(exact=True, unit="Gbps"))
        line = m.product(Style(exact=True, unit="GB/s"), (adapters, 1), (gbit, 1), scale=1 / 8)
        top = line.value
        write = m.given(top * m.between(0.86, 0.985), Style(2, unit="GB/s"))
        read = m.given(top * m.between(0.60, 0.82), Style(2, unit="GB/s"))
        part = m.ratio(Style(1, unit="%", gap=""), write, line, 100)
        other = m.ratio(Style(1, unit="%", gap=""), read, line, 100)
        shares.append(part)
        column += [(part, 100 * read.value / top), (other, 100 * write.value / top)]
        rows.append(tuple(cell(x) for x in (name, adapters, gbit, line, write, read, part, other)))
    if m.turn == 0:
        # A host measured several times, with no share given, and never read.
        texts = ("host-z", "16", "100 Gbps", "200 GB/s", "171-183 GB/s", "-", "", "")
        rows.append(tuple(cell(text) for text in texts))
    header = (
        m.pick("Host", "ホスト", "主机"),
        m.pick("NICs", "NIC 数", "网卡数"),
        m.pick("Speed of a NIC", "NIC の速度", "单卡速率"),
        m.pick("Line rate", "理論帯域", "理论带宽"),
        m.pick("Write", "書き込み", "写"),
        m.pick("Read", "読み出し", "读"),
        m.pick("Write, % of line rate", "書き込み / 理論帯域 (%)", "写 / 理论带宽 (%)"),
        m.pick("Read, % of line rate", "読み出し / 理論帯域 (%)", "读 / 理论带宽 (%)"),
    )
    best = m.gathered("max", Style(1, unit="%", gap=""), shares)
    mean = m.gathered("mean", Style(1, unit="%", gap=""), shares)
    text = sentence(
        m.pick("Writes reach ", "書き込みは理論帯域の平均 ", "写带宽平均达到理论带宽的 "),
        mean,
        m.pick(" of the line rate on average and ", "、最大 ", "，最高 "),
        best,
        m.pick(" at best.", " に達する。", "。"),
    )
    claims = [(mean, sum(s.value for s in shares[:4]) / 4), (best, sorted(s.value for s in shares)[-2])]
    return Draft(
        (
            Heading(m.pick("Line rate", "理論帯域との比較", "与理论带宽的比较")),
            Table(header, tuple(rows)),
            text,
        ),
        {"column": [Slip(n, wrong) for n, wrong in column], "claim": [Slip(n, wrong) for n, wrong in claims]},
    )


def first_request(m: Maker) -> Draft:
    """What the first request costs over two kinds of endpoint, and the speed-up in a row of its own."""
    names = (
        m.pick("First call (ms)", "初回呼び出し (ms)", "首次调用 (ms)"),
        m.pick("Warm-up of all pairs (ms)", "全ペアのウォームアップ (ms)", "全部预热 (ms)"),
        m.pick("Second call (ms)", "2 回目の呼び出し (ms)", "第二次调用 (ms)"),
        m.pick("Reconnect (ms)", "再接続 (ms)", "重连 (ms)"),
    )
    whole = Style(1)
    fast = [m.given(v * m.noise(0.2), whole) for v in (26.0, 1100.0, 5.6, 41.0)]
    slow = [m.given(n.exact * m.between(1.7, 9.0), whole) for n in fast]
    style = Style(2 if m.turn == 0 else 1, unit="x", gap="")
    gain = [m.ratio(style, b, a) for a, b in zip(fast, slow, strict=True)]
    rows = (
        (cell(m.pick("Shared endpoint", "共有エンドポイント", "共享端点")), *(cell(n) for n in fast)),
        (
            cell(m.pick("Endpoint per peer", "ピアごとのエンドポイント", "每对端一个端点")),
            *(cell(n) for n in slow),
        ),
        (cell(m.pick("Speed-up", "高速化", "加速比")), *(cell(n, bold=True) for n in gain)),
    )
    claim = m.ratio(style, slow[0], fast[0])
    text = sentence(
        m.pick("The first call is ", "初回呼び出しは ", "首次调用快 "),
        claim,
        m.pick(" faster with the shared endpoint (", " 高速になる（", "（"),
        f"{fast[0].text} ms",
        m.pick(" against ", " 対 ", " 对 "),
        f"{slow[0].text} ms",
        m.pick(").", "）。", "）。"),
    )
    header = (m.pick("Path", "経路", "路径"), *names)
    return Draft(
        (Heading(m.pick("First request", "初回リクエスト", "首次请求")), Table(header, rows), text),
        {
            "base": slips([(g, a.value / b.value) for g, a, b in zip(gain, fast, slow, strict=True)]),
            "claim": [Slip(claim, slow[3].value / fast[3].value), Slip(claim, claim.value * 1.4)],
        },
    )


def loads(m: Maker) -> Draft:
    """Models read from storage and then run: elapsed times that add up, and the rate of reading."""
    rows: list[tuple[Cell, ...]] = []
    time: list[Slip] = []
    watch = Style(2, clock=True)
    for name in m.choose(6, MODELS_WITH_SIZES):
        size = m.given(float(name.split("@")[1]) * m.noise(0.03), Style(2, unit="GB"))
        load = m.given(size.exact / m.between(0.11, 0.9), watch)
        run = m.given(m.between(95.0, 420.0), watch)
        total = m.gathered("sum", watch, [load, run])
        rate = m.ratio(Style(3, unit="GB/s"), size, load)
        time += _carry_lost(total, load, run) + decimal_minutes(total)
        rows.append((cell(name.split("@")[0]), cell(size), cell(load), cell(run), cell(total), cell(rate)))
    header = (
        m.pick("Model", "モデル", "模型"),
        m.pick("Size", "サイズ", "大小"),
        m.pick("Load", "ロード", "加载"),
        m.pick("Run", "実行", "运行"),
        m.pick("Total", "合計", "总计"),
        m.pick("Read rate", "読み出し速度", "读取速度"),
    )
    title = m.pick("Elapsed time by model", "モデルごとのエラプス時間", "各模型耗时")
    return Draft((Heading(title), Table(header, tuple(rows))), {"time": time})


MODELS_WITH_SIZES = (
    "Llama-3.2-1B@2.47",
    "Llama-3.2-3B@6.43",
    "Llama-2-7b@13.48",
    "Llama-3-8B@16.06",
    "Qwen2.5-7B@15.23",
    "Qwen2.5-14B@29.54",
    "gemma-2-9b@18.48",
    "Phi-3-mini@7.64",
)


def decimal_minutes(n: Number) -> list[Slip]:
    """Minutes as a decimal fraction, written as if the fraction were seconds: 1.43 minutes as 1m43s."""
    minutes = abs(n.value) / 60
    if minutes < 1:
        return []
    whole, part = divmod(minutes, 1)
    wrong = whole * 60 + part * 100
    style = n.style
    sign = style.show(n.value)[: 1 if n.value < 0 else 0]
    text = f"{sign}{int(whole)}m{part * 100:.{style.decimals}f}s"
    return [Slip(n, wrong if n.value > 0 else -wrong, text)] if part * 100 < 60 else []


def _carry_lost(total: Number, first: Number, second: Number) -> list[Slip]:
    """Seconds add up beyond sixty, and the minute is not carried."""
    if first.value % 60 + second.value % 60 < 60:
        return []
    wrong = total.value - 60
    return [Slip(total, wrong, clock(wrong, total.style.decimals))]
