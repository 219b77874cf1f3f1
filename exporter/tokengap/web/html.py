"""The frame of the pages for people that are rendered here, the runbooks. Their looks are those of the live page."""

from __future__ import annotations

from html import escape

from tokengap.web.files import PATH as STATIC


def document(title: str, body: str) -> bytes:
    """Return a whole page, to be served in a folder beside that of our files. ``body`` is HTML."""
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="..{STATIC}icon.svg">
<link rel="stylesheet" href="..{STATIC}page.css">
<title>{escape(title)}</title>
</head>
<body class="text">
{body}</body>
</html>
"""
    return page.encode()
