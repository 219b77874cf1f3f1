"""Whoever is told, in place of a pager: prints what Alertmanager says (``python -m tokengap.lab.pager``).

::

    14:03:12 FIRING critical TokengapOrphanGapGrowing engine=worker: Tokens are generated for clients who left.
             https://.../runbooks/TokengapOrphanGapGrowing.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

import click
import msgspec
from aiohttp import web

from tokengap.lab.parts import LOOPBACK, serve_app

#: Where the demo's Alertmanager calls it.
PORT = 9099

#: Labels that say what an alert is about, in the order of a sentence; the others are how it was found.
_ABOUT = ("engine", "hop", "instance")


class Alert(msgspec.Struct):
    """One alert of a message, of which more is known than this."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str]


class Message(msgspec.Struct):
    """What Alertmanager posts to a webhook (its configuration's ``webhook_config``, version 4)."""

    alerts: list[Alert]


def lines(message: Message, now: datetime) -> Iterator[str]:
    """Yield a line for each alert, and where it has a runbook another."""
    time = now.strftime("%H:%M:%S")
    for alert in message.alerts:
        named = " ".join(f"{label}={alert.labels[label]}" for label in _ABOUT if label in alert.labels)
        head = f"{alert.status.upper()} {alert.labels.get('severity', '')} {alert.labels.get('alertname', '')} {named}"
        yield f"{time} {' '.join(head.split())}: {alert.annotations.get('summary', '')}"
        if runbook := alert.annotations.get("runbook_url"):
            yield f"{' ' * len(time)} {runbook}"


def pager_app(say: Callable[[str], None]) -> web.Application:
    """Return the application that takes messages at its root and says each line of them."""

    async def take(request: web.Request) -> web.Response:
        try:
            message = msgspec.json.decode(await request.read(), type=Message)
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(text=f"not a message of Alertmanager's: {error}\n") from error
        for line in lines(message, datetime.now().astimezone()):
            say(line)
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_post("/", take)
    return app


@click.command()
@click.option("--host", default=LOOPBACK, show_default=True)
@click.option("--port", type=int, default=PORT, show_default=True)
def main(host: str, port: int) -> None:
    """Print what Alertmanager posts to http://HOST:PORT/."""
    serve_app(pager_app(click.echo), host, port, handler_cancellation=False)


if __name__ == "__main__":
    main()
