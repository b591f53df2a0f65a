"""Tables about plans, counts, prices and memory."""

# ruff: noqa: RUF001 - headers are published in Japanese and Chinese too

from __future__ import annotations

import math
from typing import Literal

from tests.lab.corpus.drafting import Draft, Kind, Maker, Slip
from tests.lab.corpus.figures import Number, Style
from tests.lab.corpus.layout import Cell, Heading, Table, cell, sentence

_COUNT = Style(exact=True, commas=True)


def grid(m: Maker) -> Draft:
    """Threads by batch: requests with totals, or throughput with means."""
    totals = m.turn == 1
    style = _COUNT if totals else Style(2)
    batches = (8, 16, 32, 64, 128)[: 4 + m.turn % 2]
    body = [
        [m.given((900 if totals else 38) * math.log2(2 + t * b / 40) * m.noise(0.08), style) for b in batches]
        for t in (4, 8, 16, 32, 48)
    ]
    kind: Literal["sum", "mean"] = "sum" if totals else "mean"
    name = m.pick("Total", "合計", "合计") if totals else m.pick("Mean", "平均", "平均")
    across = [m.gathered(kind, style, row) for row in body]
    down = [m.gathered(kind, style, list(column)) for column in zip(*body, strict=True)]
    corner = m.gathered(kind, style, across, kin=down)
    rows: list[tuple[Cell, ...]] = [
        (cell(f"{t}"), *(cell(n) for n in row), cell(end))
        for t, row, end in zip((4, 8, 16, 32, 48), body, across, strict=True)
    ]
    rows.append((cell(name), *(cell(n, bold=True) for n in down), cell(corner, bold=True)))
    header = (m.pick("Threads", "スレッド数", "线程数"), *(f"batch {b}" for b in batches), name)
    wrong: list[Slip] = []
    for at, end in enumerate(across):
        values = [n.value for n in body[at]]
        other = [n.value for n in body[(at + 1) % len(body)]]
        wrong += (
            [Slip(end, sum(values[:-1])), Slip(end, sum(values[1:]))]
            if totals
            else [Slip(end, sum(values[:-1]) / (len(values) - 1)), Slip(end, sum(other) / len(other))]
        )
    for at, end in enumerate(down):
        values = [row[at].value for row in body]
        wrong.append(Slip(end, sum(values[:-1]) if totals else sum(values[:-1]) / (len(values) - 1)))
    what = (
        m.pick("Completed requests", "完了リクエスト数", "完成请求数")
        if totals
        else m.pick("Throughput (GB/s)", "スループット (GB/s)", "吞吐 (GB/s)")
    )
    return Draft((Heading(what), Table(header, tuple(rows))), {kind: wrong})


def hits(m: Maker) -> Draft:
    """Requests that hit a cache and those that did not, with the rate."""
    rows: list[tuple[Cell, ...]] = []
    wrong: list[Slip] = []
    for step in range(1, 8):
        asked = m.given(int(m.between(900, 2400)), _COUNT)
        hit = m.given(int(asked.value * min(0.97, step * 0.13 * m.noise(0.06))), _COUNT)
        missed = m.difference(_COUNT, asked, hit)
        rate = m.ratio(Style(2, unit="%", gap=""), hit, asked, 100)
        wrong += [Slip(missed, missed.value + (1 if m.turn == 0 else -3))]
        qps = m.given(20 + 30 * rate.exact / 100 * m.noise(0.04), Style(1))
        rows.append((cell(f"{step}"), cell(asked), cell(hit), cell(missed), cell(rate), cell(qps)))
    header = (
        m.pick("Pass", "実行", "轮次"),
        m.pick("Requests", "リクエスト数", "请求数"),
        m.pick("Hits", "ヒット数", "命中数"),
        m.pick("Misses", "ミス数", "未命中数"),
        m.pick("Hit rate", "ヒット率", "命中率"),
        "QPS",
    )
    title = m.pick("Prefix cache", "プレフィックスキャッシュ", "前缀缓存")
    return Draft((Heading(title), Table(header, tuple(rows))), {"count": wrong})


def prices(m: Maker) -> Draft:
    """Parts of a cluster: number, price of one, amount, and the total."""
    parts = (
        (m.pick("GPU card", "GPU カード", "GPU 卡"), 4, 1250.0),
        (m.pick("Mainboard", "マザーボード", "主板"), 4, 189.9),
        (m.pick("100G adapter, used", "100G アダプタ (中古)", "100G 网卡 (二手)"), 5, 142.5),
        (m.pick("Cable", "ケーブル", "线缆"), 8, 38.25),
        (m.pick("Switch, used", "スイッチ (中古)", "交换机 (二手)"), 1, 690.0),
        (m.pick("NVMe drive", "NVMe ドライブ", "NVMe 硬盘"), 6, 94.8),
        (m.pick("Power supply", "電源", "电源"), 4, 118.4),
    )[: 6 + m.turn % 2]
    money = Style(2, commas=True, unit="USD", exact=True)
    rows: list[tuple[Cell, ...]] = []
    amounts: list[Number] = []
    pieces: list[Number] = []
    for name, count, price in parts:
        number = m.given(count + int(m.rng.integers(0, 3)), Style(exact=True))
        # A price is what it is: it was never rounded, and amounts and totals are exact to the cent.
        one = m.given(round(price * m.noise(0.1), 2), money)
        amount = m.product(money, (number, 1), (one, 1))
        pieces.append(number)
        amounts.append(amount)
        rows.append((cell(name), cell(number), cell(one), cell(amount)))
    total = m.gathered("sum", money, amounts)
    whole = m.gathered("sum", Style(exact=True), pieces)
    rows.append(
        (cell(m.pick("Total", "合計", "合计"), bold=True), cell(whole), cell("-"), cell(total, bold=True))
    )
    header = (
        m.pick("Part", "部品", "部件"),
        m.pick("Pieces", "数量", "数量"),
        m.pick("Unit price", "単価", "单价"),
        m.pick("Amount", "金額", "金额"),
    )
    wrong = [Slip(total, total.value - amounts[at].value) for at in (len(amounts) - 1, 0, 2)]
    title = m.pick("What a cluster costs", "クラスタの費用", "集群成本")
    return Draft((Heading(title), Table(header, tuple(rows))), {"sum": wrong})


def scaling(m: Maker) -> Draft:
    """Throughput by number of GPUs: prefill and decode, decode for one GPU, speed-up and efficiency."""
    rows: list[tuple[Cell, ...]] = []
    column: list[Slip] = []
    base: list[Slip] = []
    one = m.between(900.0, 1500.0)
    seen: list[Number] = []
    for gpus in (1, 2, 4, 8, 16)[: 5 - m.turn % 2]:
        number = m.given(gpus, Style(exact=True))
        fill = m.given(one * 7.3 * gpus**0.93 * m.noise(0.02), Style(1, commas=True))
        rate = m.given(one * gpus**0.88 * m.noise(0.02), Style(1, commas=True))
        seen.append(rate)
        each = m.ratio(Style(1, commas=True), rate, number)
        speed = m.ratio(Style(2, unit="x", gap=""), rate, seen[0])
        worth = m.product(Style(1, unit="%", gap=""), (rate, 1), (seen[0], -1), (number, -1), scale=100)
        if gpus > 2:
            column.append(Slip(each, fill.value / gpus))
            base.append(Slip(speed, rate.value / seen[1].value))
        rows.append(tuple(cell(x) for x in (number, fill, rate, each, speed, worth)))
    header = (
        m.pick("GPUs", "GPU 数", "GPU 数"),
        m.pick("Prefill (tokens/s)", "プリフィル (tokens/s)", "预填充 (tokens/s)"),
        m.pick("Decode (tokens/s)", "デコード (tokens/s)", "解码 (tokens/s)"),
        m.pick("Decode per GPU", "GPU あたりデコード", "单卡解码"),
        m.pick("Speed-up (decode)", "高速化 (デコード)", "加速比 (解码)"),
        m.pick("Efficiency", "並列効率", "并行效率"),
    )
    title = m.pick("Scaling", "スケーリング", "扩展性")
    return Draft((Heading(title), Table(header, tuple(rows))), {"column": column, "base": base})


def factors(m: Maker) -> Draft:
    """The factors of a plan with their levels, and how many combinations there are."""
    lists = (
        ("Backend", ("TCP", "UCX", "EFA")[: 2 + m.turn % 2]),
        (
            m.pick("Prompt tokens", "プロンプト長", "提示长度"),
            ("1K", "2K", "4K", "6K", "8K", "12K", "16K")[m.turn :],
        ),
        (m.pick("Concurrency", "並行度", "并发数"), ("c1", "c2", "c4", "c8", "c16")[: 5 - m.turn % 2]),
        ("gpu_memory_utilization", ("0.3", "0.5", "0.8", "0.9")[m.turn % 2 :]),
        ("max_num_batched_tokens", ("2048", "4096", "8192")),
        (m.pick("Prefix cache", "プレフィックスキャッシュ", "前缀缓存"), ("ON", "OFF")),
    )
    counts = [m.count(len(values)) for _, values in lists]
    rows = tuple(
        (cell(name), cell(n), cell(", ".join(values)))
        for n, (name, values) in zip(counts, lists, strict=True)
    )
    product = m.product(_COUNT, *((n, 1) for n in counts))
    number = m.count(len(lists))
    text = sentence(
        m.pick("The full factorial of the ", "", ""),
        number,
        m.pick(" factors has ", " 因子の全組み合わせは ", " 个因子的全组合共有 "),
        product,
        m.pick(" combinations.", " 通りになる。", " 种。"),
    )
    header = (
        m.pick("Factor", "因子", "因子"),
        m.pick("Levels", "水準数", "水平数"),
        m.pick("Values", "値", "取值"),
    )
    wrong: dict[Kind, list[Slip]] = {
        "count": [Slip(n, n.value + 1) for n in counts[1:4]],
        "claim": [
            Slip(product, product.value / counts[-1].value),
            Slip(product, product.value / counts[1].value),
        ],
    }
    title = m.pick("Factors", "因子と水準", "因子与水平")
    return Draft((Heading(title), Table(header, rows), text), wrong)


def layers(m: Maker) -> Draft:
    """The layers of a plan with runs and hours, their totals, and the reduction from the full plan."""
    names = (
        m.pick("Prompt sweep", "トークンスイープ", "长度扫描"),
        m.pick("Concurrency sweep", "並行度スイープ", "并发扫描"),
        m.pick("Engine settings", "エンジン設定", "引擎设置"),
        m.pick("Online and offline", "オンライン/オフライン", "在线与离线"),
        m.pick("Repeats", "反復", "重复"),
    )[: 4 + m.turn % 2]
    runs = [m.given(int(m.rng.integers(8, 34)), Style(exact=True)) for _ in names]
    hours = [m.given(n.value * m.between(0.2, 0.4), Style(1, about=True, unit="h")) for n in runs]
    total = m.gathered("sum", Style(exact=True), runs)
    time = m.gathered("sum", Style(1, about=True, unit="h"), hours)
    rows: list[tuple[Cell, ...]] = [
        (cell(f"Layer {at + 1}"), cell(f"P{at // 2}"), cell(name), cell(n), cell(h))
        for at, (name, n, h) in enumerate(zip(names, runs, hours, strict=True))
    ]
    rows.append(
        (
            cell(m.pick("Total", "合計", "合计"), bold=True),
            cell("-"),
            cell("-"),
            cell(total, bold=True),
            cell(time, bold=True),
        )
    )
    full = m.given(int(m.rng.integers(700, 4000)) * 6, _COUNT)
    saved = m.change(Style(2, unit="%", gap=""), total, full, scale=-1)
    number = m.count(len(names))
    first = sentence(
        m.pick("The plan has ", "計画は ", "计划分为 "),
        number,
        m.pick(" layers.", " 層からなる。", " 层。"),
    )
    text = sentence(
        m.pick("Of ", "全 ", "从 "),
        full.text,
        m.pick(" patterns ", " パターンを ", " 个组合减少到 "),
        total.text,
        m.pick(" remain, a reduction of ", " に絞り、削減率は ", " 个，减少了 "),
        saved,
        m.pick(".", " である。", "。"),
    )
    header = (
        m.pick("Layer", "レイヤー", "层"),
        m.pick("Priority", "優先度", "优先级"),
        m.pick("Purpose", "目的", "目的"),
        m.pick("Patterns", "パターン数", "组合数"),
        m.pick("Estimated time", "推定時間", "预计时间"),
    )
    wrong: dict[Kind, list[Slip]] = {
        "sum": [Slip(total, total.value - runs[-1].value), Slip(time, time.value - hours[-1].value)],
        "claim": [
            Slip(saved, saved.value - 1.8),
            Slip(saved, 100 * full.value / (full.value + 60 * total.value)),
        ],
        "count": [Slip(number, number.value + 1)],
    }
    title = m.pick("Layers of the plan", "レイヤード実験計画", "分层实验计划")
    return Draft((Heading(title), Table(header, tuple(rows)), first, text), wrong)


def starts(m: Maker) -> Draft:
    """Repeated server starts, five iterations each, with mean, least and greatest."""
    rows: list[tuple[Cell, ...]] = []
    wrong: list[Slip] = []
    style = Style(2)
    all_: list[list[Number]] = []
    for _ in range(6):
        level = 660 * m.noise(0.02)
        all_.append([m.given(level * m.noise(0.01) * (1.09 if at == 0 else 1), style) for at in range(5)])
    for at, values in enumerate(all_):
        mean = m.gathered("mean", style, values)
        least = m.gathered("min", style, values)
        most = m.gathered("max", style, values)
        other = all_[(at + 1) % 6]
        wrong += [Slip(mean, sum(n.value for n in values[1:]) / 4)]
        wrong += [Slip(most, max(n.value for n in values[1:])), Slip(least, min(n.value for n in other))]
        rows.append((cell(f"{at + 1}"), *(cell(n) for n in values), *(cell(n) for n in (mean, least, most))))
    header = (
        m.pick("Start", "起動", "启动"),
        *(f"{m.pick('iter', '反復', '迭代')} {i}" for i in range(1, 6)),
        m.pick("Mean", "平均", "平均"),
        m.pick("Min", "最小", "最小"),
        m.pick("Max", "最大", "最大"),
    )
    title = m.pick("TTFT by server start (ms)", "起動ごとの TTFT (ms)", "各次启动的 TTFT (ms)")
    return Draft((Heading(title), Table(header, tuple(rows))), {"mean": wrong})


_SHAPES = (
    ("model-1B", 16, 8, 64),
    ("model-3B", 28, 8, 128),
    ("model-7B", 28, 4, 128),
    ("model-8B", 32, 8, 128),
    ("model-14B", 48, 8, 128),
    ("model-32B", 64, 8, 128),
    ("model-70B", 80, 8, 128),
)


def kv_memory(m: Maker) -> Draft:
    """KV-cache of a token and of a context, from the shape of the model."""
    length = (32768, 16384, 20000)[m.turn]
    context = m.given(length, _COUNT)
    rows: list[tuple[Cell, ...]] = []
    for name, depth, heads, width in _SHAPES[m.turn % 2 :]:
        layer, head, dim, size = (m.given(v, Style(exact=True)) for v in (depth, heads, width, 2))
        terms = ((layer, 1), (head, 1), (dim, 1), (size, 1))
        each = m.product(Style(1, unit="KiB"), *terms, scale=2 / 1024)
        whole = m.product(Style(3, unit="GiB"), (each, 1), (context, 1), scale=2.0**-20)
        rows.append(tuple(cell(x) for x in (name, layer, head, dim, size, each, whole)))
    text = sentence(
        m.pick(
            "Per token: 2 (K and V) x layers x KV heads x head size x bytes of an element.",
            "1 トークンあたり: 2 (K と V) x 層数 x KV ヘッド数 x ヘッド次元 x 要素のバイト数。",
            "每个 token：2 (K 与 V) x 层数 x KV 头数 x 头维度 x 元素字节数。",
        )
    )
    header = (
        m.pick("Model", "モデル", "模型"),
        m.pick("Layers", "層数", "层数"),
        m.pick("KV heads", "KV ヘッド数", "KV 头数"),
        m.pick("Head size", "ヘッド次元", "头维度"),
        m.pick("Bytes of an element", "要素のバイト数", "元素字节数"),
        m.pick("KV per token", "トークンあたり KV", "每 token KV"),
        m.pick(
            f"KV of {context.text} tokens", f"{context.text} トークンの KV", f"{context.text} token 的 KV"
        ),
    )
    title = m.pick("KV-cache by model", "モデルごとの KV-Cache", "各模型 KV 缓存")
    return Draft((Heading(title), text, Table(header, tuple(rows))))
