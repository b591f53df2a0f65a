"""Requests' bodies and answers by themselves, as vLLM's API has them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvik.emulator import api
from kvik.emulator.api import ApiError, Bounds, Kind

BOUNDS = Bounds("tiny", 512, 4096, 4096)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_long_text_does_not_hold_up_the_server(kind: Kind) -> None:
    """It is looked at in the thread that all requests and engine steps share."""
    text = "x" * (8 << 20)
    body: dict[str, Any] = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    began = time.process_time()
    with pytest.raises(ApiError, match="the prompt has 83886"):
        api.parse(body, kind, BOUNDS)
    assert time.process_time() - began < 0.25
