"""How long an engine step takes: a stated model in place of a GPU.

A step computes `prefill` new prompt tokens and one new token for each of `decode` requests, over `context`
tokens of KV in total::

    seconds = fixed + prefill_token * prefill + decode_token * decode + context_token * context

The engine waits for a timer until that much time has passed since the step began; what the emulation itself
took counts as part of it, so a model that is faster than this machine cannot be kept, and `late` says how
often it was not. Nothing is burnt on the CPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from kvik.errors import InvalidArgument


@dataclass(frozen=True)
class ComputeModel:
    """Seconds as above. step_tokens: most tokens a step computes (a longer prompt is cut into several steps);
    sequences: most requests that run at a time."""

    fixed: float = 0.0
    prefill_token: float = 0.0
    decode_token: float = 0.0
    context_token: float = 0.0
    step_tokens: int = 2048
    sequences: int = 256

    def seconds(self, prefill: int, decode: int, context: int) -> float:
        """How long a step takes."""
        return (
            self.fixed
            + self.prefill_token * prefill
            + self.decode_token * decode
            + self.context_token * context
        )

    def prefill_seconds(self, first: int, last: int) -> float:
        """How long the prompt tokens from one position to another take, in steps of their own."""
        ends = range(first, last, self.step_tokens)
        return sum(
            self.seconds(min(at + self.step_tokens, last) - at, 0, min(at + self.step_tokens, last))
            for at in ends
        )


def derived(
    parameters: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    flops: float,
    bandwidth: float,
    step_tokens: int,
) -> ComputeModel:
    """A model from first principles, for a dense transformer on hardware with so many FLOP/s and bytes/s.

    A token costs 2 FLOP a parameter (a multiply and an add in every matrix product; Kaplan et al. 2020,
    section 2.1); a step reads all weights once; attention reads the KV of every token of the context once.
    The FLOPs of attention itself, which grow with the square of the prompt, are left out. `flops` and
    `bandwidth` are what is reached, not the peak.
    """
    token = 2 * parameters / flops
    return ComputeModel(
        fixed=weight_bytes / bandwidth,
        prefill_token=token,
        decode_token=token,
        context_token=kv_bytes_per_token / bandwidth,
        step_tokens=step_tokens,
    )


# H100 SXM: 989e12 FLOP/s dense in bf16 and 3.35e12 bytes/s (NVIDIA's data sheet); half of the one and 0.8 of
# the other are taken as reached. Llama 3.1 (Meta's model cards): 70.6e9 and 8.03e9 parameters in bf16; KV of
# a token: 80 (32) layers * 2 * 8 heads * 128 * 2 bytes.
_FLOPS, _BANDWIDTH = 0.5 * 989e12, 0.8 * 3.35e12
PRESETS = {
    "instant": ComputeModel(),
    "h100-70b-like": derived(70.6e9, 2 * 70.6e9, 80 * 4096, 4 * _FLOPS, 4 * _BANDWIDTH, 8192),
    "h100-8b-like": derived(8.03e9, 2 * 8.03e9, 32 * 4096, _FLOPS, _BANDWIDTH, 8192),
}


def parse_compute(text: str) -> ComputeModel:
    """`NAME`, `KEY=VALUE,...`, `NAME,KEY=VALUE,...`, or `doctor=FILE,...` (`kvik.emulator.recorded`);
    `InvalidArgument` says what is known."""
    if text.startswith("doctor="):
        from kvik.emulator.recorded import step_of_recording  # the doctor is seldom asked

        fixed, sequence = step_of_recording(text)
        return ComputeModel(fixed=fixed, decode_token=sequence)
    values: dict[str, Any] = {}
    known = {field.name: str(field.type) for field in fields(ComputeModel)}
    for number, part in enumerate(text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if number == 0 and not equals and key in PRESETS:
            values = asdict(PRESETS[key])
        elif equals and key in known:
            values[key] = _number(key, value, whole=known[key] == "int")
        else:
            raise InvalidArgument(
                f"compute model {text!r}: {part!r} is neither a preset ({', '.join(PRESETS)}), which comes "
                f"first, nor KEY=VALUE with a key of {', '.join(known)}, "
                "nor is the whole of it doctor=FILE,model=NAME"
            )
    return ComputeModel(**values)


def _number(key: str, text: str, *, whole: bool) -> float | int:
    try:
        value = int(text) if whole else float(text)
    except ValueError as error:
        raise InvalidArgument(f"compute model: {key}={text!r} is not a number") from error
    if not (1 if whole else 0) <= value < 1e9:
        raise InvalidArgument(f"compute model: {key}={text} is out of range")
    return value
