"""Which layers of a model keep only the last tokens.

`ModelShape` describes layers that are alike; a model with sliding windows has two kinds, which differ in
nothing but how many tokens they keep. Where a configuration does not list its layers (`layer_types`), the
rule of its kind of model stands for the list: the defaults of the model's class in transformers, and for
those that have none, a window in every layer, which is how vLLM reads `sliding_window` then.
"""

from __future__ import annotations

from kvik.shapes.config import BOUNDED, check_alike, context_of, layers_of, text_sections
from kvik.shapes.errors import ShapeError
from kvik.shapes.model import ConfigSource
from kvik.shapes.source import Section

WINDOWED = "sliding_attention"


def layer_windows(source: ConfigSource) -> tuple[int | None, ...]:
    """The window of each layer in tokens, in order; None for a layer that keeps the whole context.

    A token of a layer with a window w is attended to by itself and the w - 1 tokens after it.

    Raises `ShapeError` for layers that keep chunks or no KV, and for a file that cannot be read.
    """
    _root, text = text_sections(source)
    layers = layers_of(text)
    check_alike(text, layers)
    if text.find("attention_chunk_size"):
        raise text.wrong("attention_chunk_size", "bounds layers by chunks, which is no window")
    window = text.find("sliding_window")
    if not window or window >= context_of(text):
        return (None,) * layers
    if text.text("model_type") == "cohere2":  # its token sees `sliding_window` tokens beside itself
        window += 1
    return tuple(window if kind == WINDOWED else None for kind in _kinds(text, layers))


def _kinds(text: Section, layers: int) -> list[str]:
    listed = text.values.get("layer_types")
    if isinstance(listed, list):
        kinds = [str(kind) for kind in listed]
        if any(kind in BOUNDED and kind != WINDOWED for kind in kinds):
            raise ShapeError(f"{text.origin}: {text.path}layer_types has chunks, which are no window")
        return kinds
    if text.values.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    every = _period(text)
    if every is not None:  # one whole layer at the end of each period
        return ["full_attention" if (index + 1) % every == 0 else WINDOWED for index in range(layers)]
    first = text.find("max_window_layers") if text.has("use_sliding_window") else None
    return ["full_attention" if index < (first or 0) else WINDOWED for index in range(layers)]


def _period(text: Section) -> int | None:
    kind = text.text("model_type")
    if kind in ("gemma2", "gpt_oss", "cohere2", "gemma3_text", "gemma3"):
        default = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4}.get(kind, 6)
        return text.find("sliding_window_pattern", "_sliding_window_pattern") or default
    return None
