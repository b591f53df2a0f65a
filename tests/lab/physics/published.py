"""Numbers as articles print them."""

from __future__ import annotations

import numpy as np

from kvik_lab.physics.data import Samples

KIB = 1024.0

# "AWS EFA Transport for Mooncake", block_size sweep on p5en: write throughput in GB/s.
WRITE_GB_PER_S = {64: 97.11, 128: 190.82, 256: 324.90, 512: 357.62, 1024: 352.59, 2048: 366.87}

# "Transfer Engine Batch下发优化及LLM Datadist性能比对": TE's latency in ms, by KiB a block and blocks.
TE_CROSS_NODE = {
    (16, 20): 0.195,
    (16, 200): 1.112,
    (16, 2000): 41.12,
    (128, 20): 0.194,
    (128, 200): 1.205,
    (128, 2000): 39.03,
}
TE_CROSS_RING = {
    (16, 20): 0.135,
    (16, 200): 1.158,
    (16, 2000): 33.46,
    (128, 20): 0.177,
    (128, 200): 1.227,
    (128, 2000): 39.53,
}

# An article on a KV cache of three tiers (GPU, CPU, remote), its benchmark test_long_prefill: requests a
# second by output tokens, Qwen2.5-7B, 10,240 prompt tokens.
OUTPUT_TOKENS = (2, 4, 8, 16, 32, 64, 128)
LONG_PREFILL = {
    "compute": (0.88, 0.88, 0.86, 0.81, 0.72, 0.59, 0.43),
    "gpu": (47.94, 24.92, 12.64, 6.35, 3.18, 1.59, 0.80),
    "cpu": (9.26, 7.71, 5.80, 4.68, 2.91, 1.52, 0.78),
    "remote": (5.54, 5.03, 4.13, 4.01, 2.63, 1.44, 0.75),
}


def block_sweep() -> Samples:
    """Each block as one transfer, at the throughput that was printed."""
    size = np.array(list(WRITE_GB_PER_S)) * KIB
    seconds = size / (np.array(list(WRITE_GB_PER_S.values())) * 1e9)
    return Samples("p5en write", "bytes", size, seconds, np.ones_like(size))


def batches(table: dict[tuple[int, int], float], most: int = 10_000) -> Samples:
    """TE's batches of up to `most` blocks."""
    kept = {key: value for key, value in table.items() if key[1] <= most}
    blocks = np.array([count for _, count in kept], dtype=np.float64)
    size = np.array([kib * count for kib, count in kept]) * KIB
    return Samples("TE", "bytes", size, np.array(list(kept.values())) * 1e-3, blocks)


def long_prefill(tier: str) -> Samples:
    """Seconds a request by output tokens."""
    tokens = np.array(OUTPUT_TOKENS, dtype=np.float64)
    return Samples(tier, "tokens", tokens, 1 / np.array(LONG_PREFILL[tier]))
