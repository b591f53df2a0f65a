"""The one way in which a description of a model fails."""

from __future__ import annotations

import kvik


class ShapeError(kvik.InvalidArgument):
    """A model cannot be described: a key is missing or wrong, a kind of model is not known, a parallel size
    does not fit. The text names the key and the file, and says what to give instead."""
