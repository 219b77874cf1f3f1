"""The kernel's table of sockets, as text and as it stands on this host."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tokengap.errors import SourceError
from tokengap.readings import CLOSE_WAIT, ESTABLISHED, LISTEN
from tokengap.sources import host
from tokengap.sources.host import Row, listens, parse_rows, rows_in
from tokengap.topology import Endpoint

TABLE = b"""\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 31 1 0000000000000000 100 0 0
   1: 0100007F:1FA4 0100007F:D431 01 00000000:00000000 00:00000000 00000000 65534        0 32 1 0000000000000000 20 4 30
   2: 0100007F:1FA5 0100007F:D432 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0000000000000000
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 33 1 0 100 0 0 10 0
   1: 0000000000000000FFFF00000100007F:1F91 0000000000000000FFFF00000100007F:D433 08 0:1 00:0 0 0 0 34 1 0 20 4 30 10
"""


@pytest.mark.skipif(sys.byteorder == "big", reason="the table above is of a little-endian host")
def test_rows_of_the_kernels_table() -> None:
    """Both families, in the wanted states, mapped addresses as IPv4."""
    rows = list(parse_rows(TABLE.splitlines(keepends=True), frozenset({LISTEN, ESTABLISHED, CLOSE_WAIT})))
    assert rows == [
        Row("0.0.0.0", 8080, "0.0.0.0", 0, LISTEN, 31),
        Row("127.0.0.1", 8100, "127.0.0.1", 54321, ESTABLISHED, 32),
        Row("::1", 8080, "::", 0, LISTEN, 33),
        Row("127.0.0.1", 8081, "127.0.0.1", 54323, CLOSE_WAIT, 34),
    ]


def test_rows_of_this_host() -> None:
    """A listener of ours stands in the table with its inode, in either family."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            try:
                listener.bind((address, 0))
            except OSError:
                continue  # no IPv6 here
            listener.listen()
            port = listener.getsockname()[1]
            inode = os.fstat(listener.fileno()).st_ino
            rows = {row.inode: row for row in rows_in(LISTEN)}
            assert rows[inode].port == port
            assert rows[inode].address == address


def test_where_a_listener_is_reached() -> None:
    """A listener on every address serves each; one on an address serves that, or "this host, by port"."""
    everywhere = Row("::", 80, "::", 0, LISTEN, 1)
    loopback = Row("127.0.0.1", 80, "0.0.0.0", 0, LISTEN, 2)
    assert listens(everywhere, Endpoint("192.0.2.1", 80))
    assert listens(loopback, Endpoint(None, 80))
    assert not listens(loopback, Endpoint("192.0.2.1", 80))
    assert not listens(loopback, Endpoint(None, 81))


def test_without_proc_the_reason_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is no table the source fails with its reason."""
    monkeypatch.setattr(host, "PROC_NET", tmp_path)
    with pytest.raises(SourceError, match="needs Linux"):
        rows_in(LISTEN)
