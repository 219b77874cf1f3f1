"""The frame and the looks of every page for people, and the digest by which its policy allows them."""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; }
nav a { margin-right: 1rem; }
code { background: var(--soft); border-radius: .2rem; font: .9em ui-monospace, monospace; padding: .1rem .25rem; }
pre { background: var(--soft); border-radius: .3rem; margin: .5rem 0; overflow-x: auto; padding: .6rem .8rem; }
pre code { background: none; padding: 0; }
main { max-width: 56rem; }
"""

#: For the Content-Security-Policy: this one style sheet is allowed, by its digest, and nothing else.
STYLE_DIGEST = "sha256-" + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()


def document(title: str, body: str, *, refresh: int | None = None) -> bytes:
    """Return a whole page. ``body`` is HTML; ``refresh``: seconds after which a browser loads it anew."""
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{again}<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
    return page.encode()
