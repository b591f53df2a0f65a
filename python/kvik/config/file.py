"""The configuration file: TOML, with a table for each section.

It is the file that KVIK_CONFIG names, else `kvik/config.toml` in the user's configuration directory if there
is one. Never one of the current directory: a program must not listen elsewhere because of where it was
started. A file with anything wrong in it is refused as a whole.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvik.config.schema import ENGINE_SECTION, Option
from kvik.config.words import meant, option_meant, shown

VARIABLE = "KVIK_CONFIG"
_MOST_BYTES = 1 << 20
_HEADER = re.compile(r"\s*\[\s*([\w.\"' -]+?)\s*\]\s*(#.*)?$")
_PAIR = re.compile(r"\s*([\w.\"' -]+?)\s*=")


@dataclass
class File:
    """What a file says."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    """Checked values by key, such as `engine.channels`."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where each key is, as far as that is simple to tell."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with it, a line each."""

    def at(self, key: str) -> str:
        """`PATH:LINE` of a key."""
        line = self.lines.get(key)
        return f"{self.path}:{line}" if line else str(self.path)


def find(env: Mapping[str, str]) -> Path | None:
    """The file that counts, or None. One that KVIK_CONFIG names counts even if it is missing."""
    named = env.get(VARIABLE)
    if named:
        return Path(named)
    home = env.get("HOME")
    places = (env.get("XDG_CONFIG_HOME", ""), f"{home}/.config" if home else "")
    # The XDG base directory specification has relative paths ignored.
    directory = next((place for place in places if place.startswith("/")), None)
    if directory is None:
        return None
    path = Path(directory, "kvik", "config.toml")
    try:
        return path if path.exists() else None
    except PermissionError:  # what lies where this user may not look was not meant for this user
        return None


def load(path: Path, known: Mapping[str, Option]) -> File:
    """Read and check a file; what is wrong with it is in `problems`."""
    file = File(path)
    try:
        data = _read(file, known)
    except OSError as error:
        file.problems.append(f"{path}: the configuration file cannot be read: {error.strerror}")
        return file
    if data is not None:
        _check_keys(file, data, known)
        _check_values(file, data, known)
    return file


def _read(file: File, known: Mapping[str, Option]) -> dict[str, Any] | None:
    path = file.path
    import tomllib  # here: most engines have no file

    # Not blocking: a pipe without a writer must not be waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
        status = os.fstat(opened.fileno())
        if path == Path(os.devnull):
            return {}
        if not stat.S_ISREG(status.st_mode):
            file.problems.append(f"{path}: the configuration file is no regular file")
            return None
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        file.problems.append(f"{path}: the configuration file is larger than {_MOST_BYTES >> 20} MiB")
        return None
    try:
        text = content.decode()
        data = tomllib.loads(text)
    except UnicodeDecodeError:
        file.problems.append(f"{path}: the configuration file is not UTF-8")
        return None
    except (ValueError, RecursionError) as error:
        file.problems.append(f"{path}: the configuration file is not TOML: {error}")
        return None
    file.lines = _lines(text)
    _check_access(file, status, _has_secret(data, known))
    return data


def _lines(text: str) -> dict[str, int]:
    """The line of each key and table that is written in the usual way; the first, where text repeats it."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _plain(header[1])
            found.setdefault(table, number)
        elif pair := _PAIR.match(line):
            key = _plain(pair[1])
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found


def _plain(key: str) -> str:
    return re.sub(r"[\s\"']", "", key)


def _has_secret(data: Mapping[str, Any], known: Mapping[str, Option]) -> bool:
    secrets = [option for option in known.values() if option.kind.secret]
    tables = [(data.get(option.section), option.name) for option in secrets]
    return any(isinstance(table, dict) and name in table for table, name in tables)


def _check_access(file: File, status: os.stat_result, secret: bool) -> None:
    """Refuse a file that others can change, and a secret that others can read."""
    if status.st_mode & stat.S_IWOTH:
        file.problems.append(f"{file.path}: everybody can change this file: chmod o-w it")
    # Root's files may be readable by a group: that is how a service of its own user gets them.
    private = 0o027 if status.st_uid == 0 else 0o077
    if secret and status.st_mode & private:
        file.problems.append(
            f"{file.path}: holds a secret, and others can read this file (mode {status.st_mode & 0o777:o}): "
            f"chmod {0o640 if status.st_uid == 0 else 0o600:o} it, or give the secret by KVIK_SECRET"
        )


def _check_keys(file: File, data: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    sections = sorted({option.section for option in known.values()})
    for table, content in data.items():
        if table not in sections:
            file.problems.append(_unknown_at_top(file, table, content, sections, known))
        elif not isinstance(content, dict):
            file.problems.append(
                f"{file.at(table)}: {table} is a table: write [{table}], and its options below"
            )
        else:
            unknown = (f"{table}.{name}" for name in content)
            file.problems += [_unknown_key(file, key, known) for key in unknown if key not in known]


def _unknown_at_top(
    file: File, name: str, content: object, sections: list[str], known: Mapping[str, Option]
) -> str:
    if isinstance(content, dict):
        near, what = meant(name, sections), "table"
    else:
        option = option_meant(name, ENGINE_SECTION, known.values())
        near, what = option.key if option else None, "option"
    advice = f"; did you mean {near}?" if near else f"; the tables are {', '.join(sections)}"
    return f"{file.at(name)}: there is no {what} {shown(name)}{advice}"


def _unknown_key(file: File, key: str, known: Mapping[str, Option]) -> str:
    section, _, name = key.partition(".")
    option = option_meant(name, section, known.values())
    own = (one.name for one in known.values() if one.section == section)
    advice = f"; did you mean {option.key}?" if option else f"; [{section}] has {', '.join(own)}"
    return f"{file.at(key)}: there is no option {shown(key)}{advice}"


def _check_values(file: File, data: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    for key, option in known.items():
        table = data.get(option.section)
        if not isinstance(table, dict) or option.name not in table:
            continue
        try:
            file.values[key] = option.kind.from_value(table[option.name])
        except ValueError:
            file.problems.append(f"{file.at(key)}: {option.refusal(table[option.name])}")
