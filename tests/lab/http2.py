"""A client on HTTP/2 with prior knowledge: one connection, many streams, each of which can be reset. For tests only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

from lab.serving import until
from tokengap.lab.parts import LOOPBACK


@dataclass
class Answer:
    """What one stream got so far: bytes of its body, and whether it has ended, and how."""

    id: int
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens came: one in each event of the stand-in engine but the last."""
        return self.body.count(b"data: {")


@dataclass
class Http2Client:
    """One connection. Data is taken as it comes, and the window opened again for it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: h2.connection.H2Connection
    answers: dict[int, Answer] = field(default_factory=dict)

    def ask(self, *, max_tokens: int) -> Answer:
        """Ask for a streamed completion, on a stream of its own."""
        body = json.dumps({"model": "stand-in", "prompt": "x", "max_tokens": max_tokens, "stream": True}).encode()
        stream = self.connection.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":authority", "edge"), (":path", "/v1/completions")]
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        self.connection.send_headers(stream, headers)
        self.connection.send_data(stream, body, end_stream=True)
        self._flush()
        self.answers[stream] = Answer(stream)
        return self.answers[stream]

    def reset(self, answer: Answer) -> None:
        """Leave one stream (RST_STREAM, CANCEL), as a browser does whose user pressed Stop."""
        self.connection.reset_stream(answer.id, error_code=8)
        self._flush()
        answer.reset = True

    async def got(self, *answers: Answer, tokens: int, within: float = 10.0) -> None:
        """Wait until each of these has so many tokens."""

        async def all_have() -> bool:
            return all(answer.tokens >= tokens for answer in answers)

        await until(all_have, within)

    def _flush(self) -> None:
        self.writer.write(self.connection.data_to_send())

    async def take(self) -> None:
        """Take what comes until the connection ends."""
        while data := await self.reader.read(65536):
            for event in self.connection.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self.answers[event.stream_id].body += event.data
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    self.answers[event.stream_id].ended = True
            self._flush()


@asynccontextmanager
async def http2_client(port: int) -> AsyncIterator[Http2Client]:
    """Connect to a port on loopback while the block lasts; at its end the connection is closed as it stands."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    client = Http2Client(reader, writer, connection)
    client._flush()
    taking = asyncio.create_task(client.take())
    try:
        yield client
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        writer.transport.abort()
