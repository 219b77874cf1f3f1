"""``docs/cli.md`` shows every command as its own help does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from tokengap.cli import main

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """\
<!-- Made from the commands' own help by `make accept`. Do not edit. -->

# The command

What `--help` says, command by command. Settings can also stand in the environment or in a file, and are explained in
[configuration.md](configuration.md); completion at the shell's prompt is set up in [install.md](install.md).
"""


def page() -> str:
    """Return the whole document."""
    with click.Context(main, info_name="tokengap", **main.context_settings) as context:
        return "\n".join([HEAD, *_sections(context)])


def _sections(context: click.Context) -> Iterator[str]:
    """Yield a command's section, and those of the commands below it."""
    command = context.command
    context.terminal_width = 110
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            with click.Context(below, context, name, **below.context_settings) as inner:
                yield from _sections(inner)


def test_golden_every_command_is_in_the_documentation():
    """docs/cli.md is what the commands say. If this fails: `make accept`, and look at the diff."""
    if os.environ.get("TOKENGAP_ACCEPT"):
        DOCS.write_text(page())
    assert DOCS.read_text() == page()
