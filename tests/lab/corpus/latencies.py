"""Tables that compare times: A against B, ratios to a baseline, times to first token, stages."""

# ruff: noqa: RUF001 - headers are published in Japanese and Chinese too

from __future__ import annotations

from tests.lab.corpus.drafting import MODELS, Draft, Kind, Maker, Slip, slips
from tests.lab.corpus.figures import Number, Rule, Style, derived
from tests.lab.corpus.layout import Cell, Heading, Sentence, Table, cell, sentence
from tests.lab.corpus.transfers import decimal_minutes


def two_arms(m: Maker) -> Draft:
    """A and B by workload, their difference, and the change in percent of A."""
    rows: list[tuple[Cell, ...]] = []
    base: list[Slip] = []
    for tokens in (512, 1024, 2048, 4096, 8192, 16384)[: 5 + m.turn % 2]:
        start = 40 + tokens * m.between(0.11, 0.13)
        factor = m.between(0.68, 0.9) if tokens > 1024 else m.between(1.12, 1.3)
        a = m.given(start, Style(2, commas=True))
        b = m.given(start * factor, Style(2, commas=True))
        gap = m.difference(Style(2, signs="plus"), b, a)
        part = m.change(Style(1, unit="%", gap="", signs="plus"), b, a)
        base.append(Slip(part, 100 * (b.value - a.value) / b.value))
        runs = m.given(30, Style(exact=True))
        rows.append((cell(f"{tokens:,}"), cell(runs), cell(a), cell(b), cell(gap), cell(part, bold=True)))
    if m.turn == 1:
        a = m.given(4100 * m.noise(), Style(2, commas=True))
        waiting = m.pick("(running)", "(測定中)", "(测试中)")
        rows.append((cell("32,768"), cell("30"), cell(a), cell("-"), cell(waiting), cell("")))
    header = (
        m.pick("Prompt tokens", "プロンプト長", "提示长度"),
        m.pick("Runs", "回数", "次数"),
        "TCP (ms)",
        "RDMA (ms)",
        m.pick("RDMA - TCP (ms)", "差分 RDMA - TCP (ms)", "差值 RDMA - TCP (ms)"),
        m.pick("Change", "変化率", "变化率"),
    )
    title = m.pick("Mean latency", "平均レイテンシ", "平均时延")
    return Draft((Heading(title), Table(header, tuple(rows))), {"base": base})


def to_baseline(m: Maker) -> Draft:
    """Several ways to copy, each also as a ratio to the first."""
    rows: list[tuple[Cell, ...]] = []
    column: list[Slip] = []
    base: list[Slip] = []
    style = Style(3)
    for name in m.choose(5 + m.turn % 2, MODELS):
        start = m.between(0.2, 0.9)
        plain = m.given(start, style)
        others = [m.given(start * f * m.noise(0.05), style) for f in (4.3, 3.1, 1.25)]
        ratios = [m.ratio(Style(2), n, plain) for n in others]
        for at, ratio in enumerate(ratios):
            column.append(Slip(ratio, others[at - 1].value / plain.value))
            base.append(Slip(ratio, others[at].value / others[2 if at != 2 else 1].value))
        rows.append((cell(name), cell(plain), *(cell(n) for n in others), *(cell(n) for n in ratios)))
    ways = ("tcp", "ipc", "inproc")
    header = (
        m.pick("Model", "モデル", "模型"),
        m.pick("memcpy (s)", "memcpy (秒)", "memcpy (秒)"),
        *(f"{way} (s)" for way in ways),
        *(f"delta-{way}" for way in ways),
    )
    title = m.pick("Copies against memcpy", "memcpy に対する比", "相对 memcpy 的倍数")
    return Draft((Heading(title), Table(header, tuple(rows))), {"column": column, "base": base})


def first_token(m: Maker) -> Draft:
    """Time to first token by prompt length, the size of the KV-cache, the difference of two transports."""
    shapes = ((28, 4, 128), (32, 8, 128), (48, 8, 128))
    layers, heads, width = shapes[m.turn]
    each = m.given(2 * layers * heads * width * 2, Style(exact=True, commas=True))
    unit = ("MiB", "GiB", "MB")[m.turn]
    scale = {"MiB": 2.0**-20, "GiB": 2.0**-30, "MB": 1e-6}[unit]
    places = {"MiB": 0, "GiB": 3, "MB": 1}[unit]
    rows: list[tuple[Cell, ...]] = []
    column: list[Slip] = []
    for length in (1000, 2048, 4096, 8192, 12000, 16384)[: 5 + m.turn % 2]:
        tokens = m.given(length, Style(exact=True, commas=True))
        size = m.product(Style(places, unit=unit, about=m.turn == 0), (tokens, 1), (each, 1), scale=scale)
        alone = 8 + length * 0.231 * m.noise(0.01)
        moved = length * each.value
        style = Style(2, commas=True)
        unified = m.given(alone, style)
        tcp = m.given(alone * 1.6 + moved / 3.0e6 * m.noise(0.02) + 20, style)
        rdma = m.given(alone * 1.6 + moved / 4.5e6 * m.noise(0.02) + 70, style)
        gap = m.difference(Style(1, signs="plus", unit="ms", gap=""), rdma, tcp)
        word = m.pick("TCP faster", "TCP 優位", "TCP 更快") if gap.value > 0 else ""
        word = word or m.pick("RDMA faster", "RDMA 優位", "RDMA 更快")
        column.append(Slip(gap, rdma.value - unified.value))
        rows.append(
            (
                cell(tokens),
                cell(size),
                cell(unified),
                cell(tcp),
                cell(rdma),
                cell(gap, f" ({word})", bold=True),
            )
        )
    header = (
        m.pick("Prompt tokens", "プロンプト長", "提示长度"),
        m.pick("KV-cache", "KV-Cache サイズ", "KV 缓存大小"),
        m.pick("One node (ms)", "Unified (ms)", "单机 (ms)"),
        "TCP (ms)",
        "RDMA (ms)",
        m.pick("RDMA - TCP", "RDMA-TCP 差分", "RDMA-TCP 差值"),
    )
    intro = sentence(
        m.pick("Each token takes ", "1 トークンあたり ", "每个 token 占 "),
        each,
        m.pick(" bytes of KV-cache.", " バイトの KV-Cache が必要である。", " 字节的 KV 缓存。"),
    )
    title = m.pick("Time to first token", "TTFT の比較", "首 token 时延")
    return Draft((Heading(title), intro, Table(header, tuple(rows))), {"column": column})


def elapsed(m: Maker) -> Draft:
    """Elapsed times over two mounts: what was saved, and in percent of the first."""
    rows: list[tuple[Cell, ...]] = []
    time: list[Slip] = []
    watch = Style(3, clock=True)
    for tp, pp in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)):
        first = m.between(520.0, 900.0)
        before = m.given(first, watch)
        after = m.given(first * (1 - m.between(0.11, 0.26)), watch)
        saved = m.difference(Style(3, clock=True), after, before)
        part = m.change(Style(1, unit="%", gap=""), after, before)
        time += decimal_minutes(saved) + _minute_as_hundred(saved, before, after)
        models = m.given(7 if pp > 1 or tp > 2 else 5, Style(exact=True))
        rows.append(
            (
                cell(f"TP={tp}, PP={pp} (", models, m.pick(" models)", " モデル)", " 个模型)")),
                cell(before),
                cell(after),
                cell(saved),
                cell(part),
            )
        )
    header = (
        m.pick("Configuration", "構成", "配置"),
        "NFS/TCP",
        "NFS/RDMA",
        m.pick("Difference", "短縮時間", "差值"),
        m.pick("Change", "改善率", "变化率"),
    )
    title = m.pick("Elapsed time of a whole series", "エラプス時間", "总耗时")
    return Draft((Heading(title), Table(header, tuple(rows))), {"time": time})


def _minute_as_hundred(saved: Number, before: Number, after: Number) -> list[Slip]:
    """A minute borrowed as a hundred seconds: 11m5s - 9m39s as 1m66s."""
    if before.value % 60 >= after.value % 60:
        return []
    minutes = before.value // 60 - after.value // 60 - 1
    seconds = 100 + before.value % 60 - after.value % 60
    if minutes < 1 or seconds >= 100:
        return []
    text = f"-{int(minutes)}m{seconds:.3f}s"
    return [Slip(saved, -(minutes * 60 + seconds), text)]


def stages(m: Maker) -> Draft:
    """The stages of a request, their sum, and the share of each."""
    names = (
        m.pick("Routing", "ルーティング", "路由"),
        m.pick("Prefill", "プリフィル", "预填充"),
        m.pick("KV transfer", "KV 転送", "KV 传输"),
        m.pick("Decode start", "デコード開始", "解码启动"),
        m.pick("Network", "ネットワーク", "网络"),
        m.pick("Other", "その他", "其他"),
    )
    arms = []
    swaps: dict[Kind, list[Slip]] = {"sum": []}
    for factor in (1.0, 0.78):
        times = [m.given(v * factor * m.noise(0.25), Style(2)) for v in (14.0, 231.0, 96.0, 33.0, 8.0, 21.0)]
        total = m.gathered("sum", Style(2), times)
        shares = [m.ratio(Style(1, unit="%", gap=""), t, total, 100) for t in times]
        # Of unrounded shares, since as the share of the total in itself it is 100 %.
        whole = derived(Rule("sum", tuple(shares)), Style(1, unit="%", gap=""), unrounded=True)
        swaps["sum"] += [Slip(total, total.value - times[at].value) for at in (5, 0, 4)]
        arms.append((times, total, shares, whole))
    rows = [
        (cell(name), *(cell(x) for times, _, shares, _ in arms for x in (times[at], shares[at])))
        for at, name in enumerate(names)
    ]
    last = (cell(m.pick("Total", "合計", "合计"), bold=True),)
    rows.append((*last, *(cell(x, bold=True) for _, total, _, whole in arms for x in (total, whole))))
    share = m.pick("share", "割合", "占比")
    header = (
        m.pick("Stage", "段階", "阶段"),
        "TCP (ms)",
        f"TCP {share}",
        "RDMA (ms)",
        f"RDMA {share}",
    )
    title = m.pick("Where the time goes", "時間の内訳", "时间分解")
    return Draft((Heading(title), Table(header, tuple(rows))), swaps)


def composite(m: Maker) -> Draft:
    """Two rows a size, one for each side; the first side's cells carry the change against the second."""
    new, old = ("NEW", "OLD")
    rows: list[tuple[Cell, ...]] = []
    changes: list[Number] = []
    for size in (16, 64, 128):
        upper: list[Cell] = [cell(f"{size}K")]
        lower: list[Cell] = [cell(f"{size}K")]
        for count in (20, 200, 2000):
            slow = (0.1 + size * count / 3.1e4) * m.noise(0.2)
            worse = m.given(slow, Style(3))
            better = m.given(slow * m.between(0.45, 0.88), Style(3))
            part = m.change(Style(1, unit="%", gap="", signs="arrow"), better, worse)
            changes.append(part)
            upper.append(cell(f"{new}: ", better, " (", part, ")"))
            lower.append(cell(f"{old}: ", worse))
        rows += [tuple(upper), tuple(lower)]
    header = (
        m.pick("Block size", "ブロックサイズ", "块大小"),
        *(f"{n} {m.pick('blocks', 'ブロック', '块')}" for n in (20, 200, 2000)),
    )
    mean = m.gathered("mean", Style(1, unit="%", gap=""), changes, scale=-1)
    most = m.gathered("min", Style(1, unit="%", gap=""), changes, scale=-1)
    text = sentence(
        m.pick("Latency falls by ", "レイテンシの短縮は平均 ", "时延平均降低 "),
        mean,
        m.pick(" on average and by up to ", "、最大 ", "，最高降低 "),
        most,
        m.pick(".", " である。", "。"),
    )
    values = [-n.value for n in changes]
    wrong: dict[Kind, list[Slip]] = {
        "claim": [
            Slip(mean, sum(values[:3]) / 3),
            Slip(most, sorted(values)[-2]),
            Slip(mean, mean.value + 4),
        ],
        "mean": [Slip(mean, sum(values[:6]) / 6), Slip(most, sorted(values)[-2])],
    }
    title = m.pick("Latency (ms)", "レイテンシ (ms)", "时延 (ms)")
    return Draft((Heading(title), Table(header, tuple(rows), merged=True), text), wrong)


def grouped(m: Maker) -> Draft:
    """Throughput before and after a change, by configuration and model; one merged cell a configuration."""
    rows: list[tuple[Cell, ...]] = []
    base: list[Slip] = []
    remark = m.pick("largest change", "最大の変化", "变化最大")
    for at, (tp, pp) in enumerate(((1, 1), (2, 1), (4, 1), (2, 2))[: 3 + m.turn % 2]):
        for name in m.choose(2 + (at + m.turn) % 2, MODELS):
            rate = m.between(24.0, 160.0)
            before = m.given(rate, Style(2))
            factor = m.between(1.11, 1.3) if m.rng.random() < 0.6 else m.between(0.72, 0.9)
            after = m.given(rate * factor, Style(2))
            part = m.change(Style(1, unit="%", gap="", signs="plus"), after, before)
            base.append(Slip(part, 100 * (after.value - before.value) / after.value))
            rows.append(
                (cell(f"TP={tp}, PP={pp}"), cell(name), cell(before), cell(after), cell(part), cell(""))
            )
    rows[-1] = (*rows[-1][:-1], cell(remark if m.turn == 2 else ""))
    header = (
        m.pick("Configuration", "構成", "配置"),
        m.pick("Model", "モデル", "模型"),
        m.pick("Before (tokens/s)", "変更前 (tokens/s)", "优化前 (tokens/s)"),
        m.pick("After (tokens/s)", "変更後 (tokens/s)", "优化后 (tokens/s)"),
        m.pick("Change", "改善率", "提升"),
        m.pick("Remark", "備考", "备注"),
    )
    groups = (("", 2), (m.pick("Throughput", "スループット", "吞吐量"), 3), ("", 1))
    title = m.pick("GPU moved to the CPU's lanes", "GPU の移動", "调整 GPU 位置")
    return Draft((Heading(title), Table(header, tuple(rows), merged=True, groups=groups)), {"base": base})


def transposed(m: Maker) -> Draft:
    """Requests a second by output length in columns; below them the gain of one row over another."""
    lengths = (2, 4, 8, 16, 32, 64)
    style = Style(2)
    compute = [m.given(0.9 / (1 + n / 130) * m.noise(0.01), style) for n in lengths]
    remote = [m.given(6.4 / (1 + n / 10) * m.noise(0.03), style) for n in lengths]
    host = [m.given(10.4 / (1 + n / 12) * m.noise(0.02), style) for n in lengths]
    local = [m.given(96.0 / n * m.noise(0.01), style) for n in lengths]
    wrong: dict[Kind, list[Slip]] = {}
    if m.turn == 2:
        kind = Style(1, unit="%", gap="", signs="long")
        gains = [m.change(kind, a, b) for a, b in zip(local, host, strict=True)]
        name = m.pick("GPU over host (%)", "GPU / ホスト増加率 (%)", "GPU 相对主机 (%)")
    else:
        gains = [m.ratio(style, a, b) for a, b in zip(remote, compute, strict=True)]
        name = m.pick("Remote / compute", "リモート / 計算", "远端 / 计算")
        after = [*compute[1:], compute[0]]
        wrong["column"] = slips(
            [(g, a.value / b.value) for g, a, b in zip(gains, remote, after, strict=True)]
        )
    names = (
        m.pick("Compute", "計算", "计算"),
        m.pick("Remote hit", "リモートヒット", "远端命中"),
        m.pick("Host hit", "ホストヒット", "主机命中"),
        m.pick("GPU hit", "GPU ヒット", "GPU 命中"),
    )
    rows = [
        (cell(label), *(cell(n) for n in row))
        for label, row in zip(names, (compute, remote, host, local), strict=True)
    ]
    rows.append((cell(name), *(cell(n) for n in gains)))
    header = (
        m.pick("Stage \\ output tokens", "段階 \\ 出力長", "阶段 \\ 输出长度"),
        *(str(n) for n in lengths),
    )
    title: Heading | Sentence = Heading(m.pick("Requests a second", "秒あたりリクエスト数", "每秒请求数"))
    return Draft((title, Table(header, tuple(rows))), wrong)
