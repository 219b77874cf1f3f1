"""Which tokens of an answer its client has. Pure: no I/O.

A token is useful once the last byte of its event was acknowledged by the client's kernel. What was written to a socket
is not delivered: on a client that vanished the two differ by hundreds of times.
"""

from __future__ import annotations

from collections import deque


class Delivery:
    """The ledger of one answer: tokens written, and by how many bytes of the answer each was complete."""

    __slots__ = ("_written", "out", "useful")

    def __init__(self) -> None:
        self.out = 0
        self.useful = 0
        self._written: deque[tuple[int, int]] = deque()

    def wrote(self, tokens: int, position: int) -> None:
        """``tokens`` in all are in the first ``position`` bytes of the answer. Neither falls."""
        if tokens > self.out:
            self.out = tokens
            self._written.append((position, tokens))

    def acknowledged(self, position: int) -> None:
        """The client acknowledged the first ``position`` bytes of the answer."""
        while self._written and self._written[0][0] <= position:
            self.useful = self._written.popleft()[1]
