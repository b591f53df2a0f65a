"""How the lab fails: with what is wrong, where it stands, and what to do about it."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import kvik

M = TypeVar("M", bound=BaseModel)


class LabError(kvik.InvalidArgument):
    """The lab was given something that it cannot work with: a study file with a mistake, a design that cannot
    be made, data that cannot support what was asked of them. The text says where, and what to do."""


def validated(form: type[M], data: Any, where: str, whole: str = "the load") -> M:
    """What a file has in it, in its form. Raises `LabError` that names each key and what is wrong with it."""
    try:
        return form.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{where}: {'.'.join(map(str, one['loc'])) or whole}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]
        raise LabError("\n".join(lines)) from error
