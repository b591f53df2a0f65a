"""What a model's KV looks like: layers, heads, element type, and how many bytes that makes.

>>> from kvik.shapes import ModelShape
>>> ModelShape.preset("llama-3.1-8b").kv_bytes_per_token()
131072
>>> ModelShape.from_config("/models/mine", dtype="fp8").page_bytes(page_tokens=16, tp=2)

The numbers are those of vLLM's own KV-cache specifications; tests compare them.
"""

from kvik.shapes.dtypes import ELEMENT_BYTES, canonical_dtype
from kvik.shapes.errors import ShapeError
from kvik.shapes.model import Attention, ConfigSource, ModelShape, RankLayout
from kvik.shapes.presets import PRESETS, Preset, presets
from kvik.shapes.windows import layer_windows

__all__ = [
    "ELEMENT_BYTES",
    "PRESETS",
    "Attention",
    "ConfigSource",
    "ModelShape",
    "Preset",
    "RankLayout",
    "ShapeError",
    "canonical_dtype",
    "layer_windows",
    "presets",
]
