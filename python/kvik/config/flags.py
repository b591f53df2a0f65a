"""The flags of a command, made from a table of options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from kvik.config.kinds import Choice, Flag
from kvik.config.resolve import values
from kvik.config.schema import Entry, Option
from kvik.errors import InvalidArgument, KvikError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _reader(option: Option) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """What turns the text of a flag, or the texts of one that may be repeated, into a value."""

    def read(_ctx: click.Context, _param: click.Parameter, given: Any) -> Any:
        texts = given if option.kind.several else [] if given is None else [given]
        try:
            read = [option.kind.from_text(text) for text in texts]
        except ValueError as error:
            raise click.BadParameter(option.refusal(given)) from error
        if option.kind.several:
            return tuple(part for one in read for part in one) or None
        return read[0] if read else None

    return read


def options(entry: Entry) -> Callable[[_Command], _Command]:
    """Give a click command a flag for each option of an entry point.

    A flag has no default of its own, so that the command can tell what was given: it hands what it got to
    `chosen`. `--help` says the default and the variable.
    """

    def decorate(command: _Command) -> _Command:
        for option in reversed(entry.options):
            command = _flag(option)(command)
        return command

    return decorate


def chosen(entry: Entry, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each option, given what a command got for its flags. Raises click's UsageError."""
    try:
        return values(entry, given)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


@contextlib.contextmanager
def telling(*others: type[Exception]) -> Iterator[None]:
    """Errors of the block as a command tells them: InvalidArgument with status 2, as for a wrong flag; other
    errors of kvik, and `others`, with status 1."""
    failures: tuple[type[Exception], ...] = (KvikError, *others)
    try:
        yield
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    except failures as error:
        raise click.ClickException(str(error)) from error


def _flag(option: Option) -> Callable[[_Command], _Command]:
    default = "required" if option.required else f"default {option.shown(option.default)}"
    repeat = " May be repeated." if option.kind.several else ""
    words = f" One of {', '.join(option.kind.words)}." if isinstance(option.kind, Choice) else ""
    text = f"{option.help}{words}{repeat} [{option.variable}; {default}]"
    if isinstance(option.kind, Flag):
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", default=None, help=text)
    return click.option(
        option.flag,
        callback=_reader(option),
        metavar=option.kind.metavar,
        multiple=option.kind.several,
        help=text,
    )
