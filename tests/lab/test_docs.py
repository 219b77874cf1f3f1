"""docs/lab.md and docs/drill.md are true: the example runs, and everything that can be asked for is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.commands import ARTICLE

DOCS = Path(__file__).parent.parent.parent / "docs"
TEXT = (DOCS / "lab.md").read_text()


@pytest.mark.e2e
def test_the_example_runs(capsys: pytest.CaptureFixture[str]):
    """Through the leaking gateway all tokens are generated, and fewer are received."""
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(example, "docs/lab.md", "exec"), {})
    generated, received = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert generated == 2000
    assert 1200 <= received < 2000


def test_every_flag_and_route_is_in_the_docs():
    """What the engine, the gateway and the replay can be told, and what is served under /lab/."""
    from tokengap.lab import engine, gateway, replay

    flags = [
        flag
        for command in (engine.main, gateway.main, replay.main)
        for option in command.params
        for flag in option.opts
        if flag.startswith("-")
    ]
    routes = [resource.canonical for resource in engine.EngineServer(engine.Knobs()).app().router.resources()]
    assert [name for name in (*flags, *routes) if name not in TEXT] == []


def test_every_option_and_field_of_the_drill_is_in_the_docs():
    """By the name under which it is typed or printed."""
    from tokengap.lab.drill import drill
    from tokengap.lab.stage import LEAKS

    text = (DOCS / "drill.md").read_text()
    options = [name for option in drill.params for name in (*option.opts, *option.secondary_opts)]
    wanted = [f"`{name}`" for name in (*options, *LEAKS, *ARTICLE)]
    assert [name for name in wanted if name not in text] == []
