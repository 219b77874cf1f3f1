"""/proc and psutil where sock_diag is refused: the same sockets, fewer columns."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokengap.errors import SourceRefused, SourceUnusable
from tokengap.lab.parts import free_port
from tokengap.readings import CLOSE_WAIT, FIN_WAIT1, SOCKET, TIMER_PROBE, UNKNOWN, SocketTable
from tokengap.sources import sock_diag, socket_fallbacks, sockets
from tokengap.sources.socket_fallbacks import parse_proc, read_proc
from tokengap.sources.sockets import Sockets, probe

NONE: frozenset[int] = frozenset()
HEADING = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
#: A half-open client, a stalled one, one in TIME-WAIT and a listener, in the format of Linux 6.18.
RECORDED = HEADING + (
    "   0: 0100007F:1F90 0100007F:B2A8 01 00004602:00000000 01:000000C6 00000004     0        0 71234 2 "
    "00000000d1c8a3f1 327 4 30 1 7\n"
    "   1: 0100007F:1F90 0100007F:B2AA 01 00002EFE:00000000 04:0000005C 00000000     0        3 71235 2 "
    "00000000d1c8a3f2 20 4 30 10 -1\n"
    "   2: 0100007F:1F90 0100007F:B2AC 06 00000000:00000000 03:000004F2 00000000     0        0 0 3 0000000058\n"
    "   3: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 71230 1 "
    "00000000d1c8a3f0 100 0 0 10 0\n"
)
DUAL = (
    "   0: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:B2AE 08 00000000:00000001 "
    "00:00000000 00000000  1000        0 71299 1 0000000000000000 20 4 29 10 -1\n"
    "   1: B80D0120000000000000000001000000:1F90 B80D0120000000000000000002000000:B2B0 04 00000010:00000000 "
    "01:00000014 00000000     0        0 0 3 0000000000000000 20 4 29 10 -1\n"
)


@pytest.fixture
def three_families() -> object:
    """Connections over v4, v6 and v4-mapped, one half-closed, one stalled; yields the listening ports."""
    with contextlib.ExitStack() as opened:
        ports = []
        for family, bind, host in (
            (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
            (socket.AF_INET6, "::1", "::1"),
            (socket.AF_INET6, "::", "127.0.0.1"),
        ):
            server = socket.create_server((bind, free_port()), family=family, dualstack_ipv6=bind == "::")
            opened.enter_context(server)
            ports.append(server.getsockname()[1])
            client = opened.enter_context(socket.create_connection((host, ports[-1])))
            served = opened.enter_context(server.accept()[0])
            if bind == "::1":
                client.shutdown(socket.SHUT_WR)
            if bind == "::":
                served.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        served.send(bytes(65536))
        yield frozenset(ports)


def keys(table: SocketTable) -> set[tuple[int, ...]]:
    names = ("src_hi", "src_lo", "dst_hi", "dst_lo", "sport", "dport", "state")
    return {tuple(int(row[name]) for name in names) for row in table}


def snapshot(way: str, listening: frozenset[int], targets: frozenset[int]) -> SocketTable:
    with contextlib.closing(Sockets(way=way)) as source:  # type: ignore[arg-type]  # a parameter of the test
        taken = source.snapshot(listening, targets)
        assert taken.way == way
        return taken.open


@pytest.mark.parametrize("way", ["proc", "psutil"])
def test_the_same_sockets_as_sock_diag(way: str, three_families: frozenset[int]) -> None:
    """Addresses, ports and states agree for each family, whichever side is asked for."""
    for listening, targets in ((three_families, NONE), (NONE, three_families), (three_families, three_families)):
        rows = snapshot(way, listening, targets)
        assert keys(rows) == keys(snapshot("sock_diag", listening, targets))
        assert len(rows) == len(set(rows["cookie"].tolist()))
    assert len(snapshot(way, NONE, NONE)) == 0


def test_proc_agrees_on_queues_timers_and_inodes(three_families: frozenset[int]) -> None:
    """What /proc tells is what sock_diag tells; what it does not tell is unknown."""
    give_up = time.monotonic() + 5
    while TIMER_PROBE not in snapshot("sock_diag", three_families, NONE)["timer"]:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    told = {int(row["inode"]): row for row in snapshot("proc", three_families, NONE)}
    truth = {int(row["inode"]): row for row in snapshot("sock_diag", three_families, NONE)}
    assert told.keys() == truth.keys()
    for inode, row in told.items():
        assert row["cookie"] == inode
        for name in ("rqueue", "wqueue", "retransmits"):
            assert row[name] == truth[inode][name], name
        for name in ("bytes_acked", "bytes_received", "bytes_sent", "last_data_recv", "backoff", "notsent"):
            assert row[name] == UNKNOWN
    assert TIMER_PROBE in {int(row["timer"]) for row in told.values()}


def test_psutil_knows_states_only(three_families: frozenset[int]) -> None:
    """Every number is unknown, none is zero; the cookie stays the same from one snapshot to the next."""
    first, second = (snapshot("psutil", three_families, NONE) for _ in range(2))
    assert set(first["cookie"].tolist()) == set(second["cookie"].tolist())
    for name in SOCKET.names:
        if SOCKET[name] == "i8":
            assert (first[name] == UNKNOWN).all()


# --- the format of /proc --------------------------------------------------------------------------------------------


def test_lines_of_proc() -> None:
    """A half-open and a stalled client are told apart; LISTEN and TIME-WAIT are left out."""
    half_open, stalled = parse_proc(RECORDED, frozenset({8080}), NONE)
    assert (half_open["timer"], half_open["retransmits"], half_open["wqueue"]) == (1, 4, 0x4602)
    assert (half_open["rto_us"], half_open["inode"]) == (3_270_000, 71234)
    assert (stalled["timer"], stalled["retransmits"], stalled["wqueue"]) == (TIMER_PROBE, 0, 0x2EFE)
    assert (stalled["src_hi"], stalled["src_lo"], stalled["dport"]) == (0, 0xFFFF_7F00_0001, 0xB2AA)


def test_ipv6_and_sockets_without_an_inode() -> None:
    """Four words make an address; a socket that no process holds is known by its addresses."""
    mapped, closing = parse_proc(HEADING + DUAL, frozenset({8080}), NONE)
    assert (mapped["src_hi"], mapped["src_lo"], mapped["state"]) == (0, 0xFFFF_7F00_0001, CLOSE_WAIT)
    assert (closing["src_hi"], closing["src_lo"], closing["dst_lo"]) == (0x20010DB8_00000000, 1, 2)
    assert (closing["state"], closing["inode"]) == (FIN_WAIT1, 0)
    assert closing["cookie"] >> 63 == 1
    assert closing["cookie"] == parse_proc(DUAL, frozenset({8080}), NONE)[1]["cookie"]


@pytest.mark.parametrize(
    "line",
    [
        "   0: 0100007F:1F90",
        "   0: 0100007F 0100007F:B2A8 01 0:0 01:0 0 0 0 1 2",
        "   0: 0100007F:1F90 0100007F:B2A8 01 zz:00000000 01:000000C6 00000004 0 0 71234 2 0 327",
        "   0: 0100007F:1F90 0100007F:B2A8 01 0:0 1FF:0 00000004 0 0 71234 2 0 327",
        "   0: 0100007F:1F90 0100007F:B2A8 01 0:0 01:0 00000004 0 0 99999999999999999999999 2 0 327",
        "<html>",
    ],
)
def test_a_line_of_another_format_is_unusable(line: str) -> None:
    """A table that is not understood is refused, not half-read."""
    with pytest.raises(SourceUnusable, match="/proc/net/tcp"):
        parse_proc(HEADING + line + "\n", frozenset({8080}), NONE)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(RECORDED.split() + DUAL.split())).map(" ".join)))
def test_any_text_is_a_table_or_unusable(text: str) -> None:
    """The parser fails in one way only."""
    with contextlib.suppress(SourceUnusable):
        assert parse_proc(text, frozenset({8080}), NONE).dtype == SOCKET


def test_a_missing_table_is_refused_and_a_missing_tcp6_is_not(tmp_path: Path) -> None:
    """Without IPv6 there is no tcp6."""
    with pytest.raises(SourceRefused, match="No such file"):
        read_proc(frozenset({8080}), NONE, tmp_path)
    (tmp_path / "tcp").write_text(RECORDED)
    assert len(read_proc(frozenset({8080}), NONE, tmp_path)) == 2


def test_the_table_of_a_pid_can_be_read(three_families: frozenset[int]) -> None:
    """``/proc/<pid>/net`` is the table of that process's namespace."""
    rows = read_proc(three_families, NONE, Path(f"/proc/{os.getpid()}/net"))
    assert len(rows) == 3


# --- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EPROTONOSUPPORT, errno.ENOENT, errno.EPERM, errno.EACCES])
def test_a_refused_sock_diag_falls_back_to_proc(
    number: int, three_families: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source goes on with less, and says what was refused."""

    def refuse() -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sockets, "open_link", refuse)
    with contextlib.closing(Sockets()) as source:
        assert source.describe() == f"proc, no byte counters; sock_diag refused: {os.strerror(number)}"
        taken = source.snapshot(three_families, NONE)
        assert (taken.way, taken.events, len(taken.open)) == ("proc", False, 3)
    with pytest.raises(SourceRefused, match=os.strerror(number)):
        Sockets(way="sock_diag")
    access = probe()
    assert (access.way, access.sock_diag, access.sock_diag_reason) == ("proc", False, os.strerror(number))
    assert (access.events, access.tcp_info) == (False, None)


def test_a_kernel_that_answers_enoent_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the inet_diag module the socket opens and the request fails: asked with a family that has none."""
    monkeypatch.setattr(sock_diag, "dump_request", lambda *_: _request_for_no_family())
    with contextlib.closing(Sockets()) as source:
        assert source.describe() == "proc, no byte counters; sock_diag refused: No such file or directory"


_real_request = sock_diag.dump_request


def _request_for_no_family() -> bytes:
    return _real_request(socket.AF_UNSPEC)


def test_without_proc_psutil_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last way needs nothing; each refusal before it is told."""
    monkeypatch.setattr(socket_fallbacks, "OWN_NAMESPACE", tmp_path)
    monkeypatch.setattr(sockets, "OWN_NAMESPACE", tmp_path)
    monkeypatch.delattr(socket, "AF_NETLINK")
    with contextlib.closing(Sockets()) as source:
        assert source.describe() == (
            f"psutil, states only; sock_diag refused: netlink is Linux only; proc refused: no {tmp_path}/tcp"
        )
    with pytest.raises(SourceRefused, match="no "):
        Sockets(way="proc")


def test_psutil_that_needs_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS tells connections to root only."""

    def deny(_: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", deny)
    with contextlib.closing(Sockets(way="psutil")) as source, pytest.raises(SourceRefused, match="root only"):
        source.snapshot(frozenset({1}), NONE)
