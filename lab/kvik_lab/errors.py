"""How the lab fails: with what is wrong, where it stands, and what to do about it."""

from __future__ import annotations

import kvik


class LabError(kvik.InvalidArgument):
    """The lab was given something that it cannot work with: a study file with a mistake, a design that cannot
    be made, data that cannot support what was asked of them. The text says where, and what to do."""
