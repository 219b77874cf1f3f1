"""``docs/cli.md`` shows every command as its own help does."""

from __future__ import annotations

import os
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
    with click.Context(main, info_name="tokengap", **main.context_settings) as above:
        sections = [_section("tokengap", main, above)]
        for name in main.list_commands(above):
            command = main.get_command(above, name)
            with click.Context(command, parent=above, info_name=name) as context:
                sections.append(_section(f"tokengap {name}", command, context))
    return "\n".join([HEAD, *sections])


def _section(title: str, command: click.Command, context: click.Context) -> str:
    context.terminal_width = 110
    return f"## {title}\n\n```text\n{command.get_help(context)}\n```\n"


def test_golden_every_command_is_in_the_documentation():
    """docs/cli.md is what the commands say. If this fails: `make accept`, and look at the diff."""
    if os.environ.get("TOKENGAP_ACCEPT"):
        DOCS.write_text(page())
    assert DOCS.read_text() == page()
