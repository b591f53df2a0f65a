"""Images of a request as vLLM's scheduler has them, without torch."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np


class Pixels:
    """torch's tensor, as far as its bytes are read."""

    dtype = "torch.float64"
    device = SimpleNamespace(type="cpu")

    def __init__(self, *numbers: float) -> None:
        self._numbers = np.array(numbers)
        self.shape = self._numbers.shape

    def untyped_storage(self) -> None:
        raise AssertionError("is looked for only")

    def numpy(self) -> Any:
        return self._numbers.view(np.uint8)

    def view(self, _dtype: Any) -> Pixels:
        return self

    detach = contiguous = flatten = lambda self: self


class Data(UserDict[str, Any]):
    """vLLM's MultiModalKwargsItem."""


def image(data: Any, identifier: str, offset: int = 5) -> Any:
    """vLLM's MultiModalFeatureSpec."""
    return SimpleNamespace(
        identifier=identifier,
        modality="image",
        data=data,
        mm_position=SimpleNamespace(offset=offset, length=2),
    )


def pixels(*numbers: float) -> Data:
    """What the model is given of an image."""
    return Data(pixels=[Pixels(1.0, 2.0, 3.0, 4.0), Pixels(*numbers)], grid=(1, 2))
