"""Records in files: one JSON object a line, appended and never changed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvik_lab.errors import LabError
from kvik_lab.records.schema import SCHEMA, LoadResult, RunRecord

_Form = TypeVar("_Form", bound=BaseModel)


def dump(record: RunRecord | LoadResult) -> str:
    """The record as one line of JSON, without what is not stated."""
    stated = record.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return json.dumps({"schema": SCHEMA, **stated}, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file in one step: who reads it finds the old one, or all of the new one.

    Raises `OSError` with the file's name, and leaves the old one.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def append(path: Path, record: RunRecord) -> None:
    """Add a record to a file, and return when it is on the disk.

    Raises `OSError` with the file's name where it cannot be written, and leaves the file as it was. Raises
    `LabError` for a file whose last line has no end: behind half a line this would be no record.
    """
    before = _end(path)
    try:
        with path.open("ab") as file:
            file.write(dump(record).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _end(path: Path) -> int:
    """The length of a file that a record may be added to."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) in (b"", b"\n"):
            return end
    raise LabError(
        f"{path}: its last line has no end, so nothing is added behind it; end it, or take it away as "
        "`kvik lab resume` does in its journal, or give another file"
    )


def mend(file: Path) -> None:
    """Take away a last line without its end, which a writer that was killed had begun."""
    if not file.is_file():
        return
    with file.open("r+b") as opened:
        end = opened.seek(0, os.SEEK_END)
        keep = end
        while keep:
            opened.seek(max(0, keep - 4096))
            found = opened.read(min(keep, 4096)).rfind(b"\n")
            if found >= 0:
                keep = max(0, keep - 4096) + found + 1
                break
            keep = max(0, keep - 4096)
        if keep < end:
            opened.truncate(keep)
            os.fsync(opened.fileno())


def iterate(path: Path) -> Iterator[RunRecord]:
    """Every record of a file in its order, superseded ones included.

    A last line without its end is what a writer that was killed had begun; it is left out. Raises `LabError`
    with the line of anything else that is no record.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                if line.strip():
                    yield _parsed(RunRecord, line, f"{path}, line {number}")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}; give a file of run records") from error


def read(paths: Iterable[Path]) -> tuple[RunRecord, ...]:
    """The records of files; where one id comes again in its file, only the last with it, in the place of the
    first. Of several files starts and groups are told apart by the file's number, from 1: `2/s1`.

    Raises `LabError` for one id in two files: which of them counts nobody has said.
    """
    files = list(paths)
    found: dict[str, RunRecord] = {}
    for number, path in enumerate(files, 1):
        own = {record.id: record for record in iterate(path)}
        if twice := own.keys() & found.keys():
            raise LabError(f"{path}: has run {min(twice)}, which an earlier file has, too; give one of them")
        found |= own if len(files) == 1 else {name: _of_file(number, one) for name, one in own.items()}
    return tuple(found.values())


def _of_file(number: int, record: RunRecord) -> RunRecord:
    """Every study calls its first start s1."""
    names = {"start": record.place.start, "group": record.place.group}
    told = {name: value if value is None else f"{number}/{value}" for name, value in names.items()}
    return record.model_copy(update={"place": record.place.model_copy(update=told)})


def read_load(path: Path) -> LoadResult:
    """What a load driver has written. Raises `LabError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LabError(
            f"{path}: cannot be read: {error.strerror}; give what `kvik lab load` wrote"
        ) from error
    return _parsed(LoadResult, data, str(path))


def _parsed(form: type[_Form], data: bytes, where: str) -> _Form:
    try:
        return form.model_validate_json(data)
    except ValidationError as error:
        _check_version(data, where)
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise LabError(
            f"{where}: is no {form.__name__}: {place + ': ' if place else ''}{first['msg']}"
            + (f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else "")
        ) from error


def _check_version(data: bytes, where: str) -> None:
    """A newer form is refused by its number, not by the first key that this one does not know."""
    try:
        found = json.loads(data)
    except ValueError:
        return
    version = found.get("schema", SCHEMA) if isinstance(found, dict) else SCHEMA
    if version != SCHEMA:
        raise LabError(
            f"{where}: has form {version!r}, and this program reads {SCHEMA}; use the version of kvik-lab "
            "that wrote it, or a newer one"
        )
