"""What the study is about: a model, or several, as far as bytes go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvik.shapes import ELEMENT_BYTES, ModelShape, canonical_dtype
from kvik_lab.errors import LabError


@dataclass(frozen=True)
class Model:
    """One model: its KV's shape, the text that describes it, and the bytes of one weight."""

    name: str
    shape: ModelShape
    parameter_bytes: int
    text: str = ""

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of all weights: parameters * bytes of one. None where the parameters are not known."""
        return None if self.shape.parameters is None else self.shape.parameters * self.parameter_bytes


@dataclass(frozen=True)
class Unit:
    """The model of a study, or those that its factor `model` chooses from; by the names that the file has."""

    model: str | None
    models: Mapping[str, Model]

    def find(self, name: str | None = None) -> Model:
        """The study's model, or the named one. Raises `LabError` where there is none."""
        wanted = self.model if name is None else name
        if wanted is not None and wanted in self.models:
            return self.models[wanted]
        known = ", ".join(self.models) or "none"
        raise LabError(f"the study has no model {wanted!r}; its models: {known}; name one in unit.model")

    def token_bytes(self, name: str | None = None) -> int:
        """Bytes of KV of one token, over all ranks."""
        return self.find(name).shape.kv_bytes_per_token()

    def weights_bytes(self, name: str | None = None) -> int:
        """Bytes of the weights. Raises `LabError` where the number of parameters is not known."""
        model = self.find(name)
        found = model.weights_bytes
        if found is None:
            raise LabError(
                f"how many parameters {model.name!r} has is not known, so weights_bytes has no value; say "
                "unit.kv.parameters, or put the number into the constraint"
            )
        return found


def describe_model(name: str, text: str, kv_dtype: str | None, weights_dtype: str | None) -> Model:
    """A model by a preset's name, a path, or `layers=4,kv_heads=2,...`. `ShapeError` for none."""
    own = ModelShape.resolve(text)
    shape = ModelShape.resolve(text, dtype=kv_dtype) if kv_dtype else own
    return Model(name, shape, ELEMENT_BYTES[canonical_dtype(weights_dtype or own.dtype)], text)
