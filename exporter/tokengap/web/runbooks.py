"""The runbooks at ``/runbooks/``: the text that ``tokengap bundle`` writes, with this exporter's own numbers, as HTML.

They are there where nothing else is, behind an air gap for one, and always of the version that runs. Links between them
lead to the pages here, and are relative; raw HTML in a text would be shown, not passed through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from tokengap.bundle.render import runbooks
from tokengap.bundle.site import Site
from tokengap.web.html import document

#: The name of the file that is served at their folder itself.
_INDEX = "README"

_NAVIGATION = """<nav>
<a href="../">Exporter</a>
<a href="./">Runbooks</a>
<a href="decision-matrix">Decision matrix</a>
<a href="rollback">Roll back</a>
</nav>
"""


def pages(site: Site) -> Mapping[str, bytes]:
    """Return every page by its name, the index by an empty one."""
    texts = {PurePosixPath(file.path).stem: file.text for file in runbooks.files(site)}
    markdown = _reader(texts)
    return {_page_name(name): _page(markdown, text) for name, text in texts.items()}


def _page(markdown: MarkdownIt, text: str) -> bytes:
    title = text.splitlines()[0].removeprefix("# ")
    return document(f"{title} - tokengap", f"{_NAVIGATION}<main>\n{markdown.render(text)}</main>\n")


def _page_name(file: str) -> str:
    return "" if file == _INDEX else file


def _reader(texts: Mapping[str, str]) -> MarkdownIt:
    """Return what makes HTML of a text: tables that scroll by themselves, and links to the pages here."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    links = {f"{name}.md": f"./{_page_name(name)}" for name in texts}

    def link(renderer: RendererHTML, tokens: Sequence[Token], number: int, options: Any, env: Any) -> str:
        file, hash_, anchor = str(tokens[number].attrs["href"]).partition("#")
        tokens[number].attrs["href"] = links.get(file, file) + hash_ + anchor
        return renderer.renderToken(tokens, number, options, env)

    markdown.add_render_rule("link_open", link)
    markdown.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return markdown
