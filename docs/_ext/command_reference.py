"""`.. commands::`: every subcommand of `kvik` with its options, as the command tells them."""

from collections.abc import Iterator

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvik.cli import main


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """All commands that do something, by their full name, in the order of `--help`."""
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


class Commands(SphinxDirective):
    """The directive: one section a command."""

    def run(self) -> list[nodes.Node]:
        """Sections, so that the page's own table of contents has them."""
        return [self._section(name, command) for name, command in commands(main, "kvik")]

    def _section(self, name: str, command: click.Command) -> nodes.section:
        section = nodes.section(ids=[name.replace(" ", "-")])
        section += nodes.title(name, name)
        self.state.document.note_explicit_target(section, section)
        context = click.Context(command, info_name=name)
        usage = command.get_usage(context)
        section += nodes.literal_block(usage, usage, language="text")
        for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
            section += nodes.paragraph("", " ".join(paragraph.split()))
        options = nodes.definition_list()
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                options += _definition(record[0], record[1], envvar_of(parameter))
        section += options
        return section


def envvar_of(parameter: click.Parameter) -> str:
    """The variable that stands for an option, or nothing."""
    return parameter.envvar if isinstance(parameter.envvar, str) else ""


def _definition(term: str, text: str, variable: str) -> nodes.definition_list_item:
    item = nodes.definition_list_item()
    item += nodes.term("", "", nodes.literal(term, term))
    said = nodes.paragraph("", " ".join(text.split()))
    if variable:
        said += [nodes.Text(" Variable: "), nodes.literal(variable, variable), nodes.Text(".")]
    item += nodes.definition("", said)
    return item


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
