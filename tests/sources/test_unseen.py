"""What the kernel tells of unix-domain sockets: real answers, broken ones, and which connections lead on."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokengap.sources.host import Row
from tokengap.sources.unseen import UnixSocket, connected_to, parse_unix_diag, quic_ports, udp_rows, unix_sockets


def test_both_ends_of_a_connection_know_each_other(tmp_path: Path):
    """The accepted end has the path; of an abstract name, the first byte is written as @. Datagram sockets are left
    out."""
    for name, shown in (
        (str(path := tmp_path / "s"), str(path)),
        (f"\0tokengap-{os.getpid()}", f"@tokengap-{os.getpid()}"),
    ):
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(name)
            listener.listen()
            client.connect(name)
            with listener.accept()[0] as accepted, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
                inodes = [os.fstat(end.fileno()).st_ino for end in (client, accepted, datagram)]
                by_inode = {one.inode: one for one in unix_sockets() or ()}
                assert by_inode[inodes[0]] == UnixSocket(inodes[0], "", inodes[1])
                assert by_inode[inodes[1]] == UnixSocket(inodes[1], shown, inodes[0])
                assert inodes[2] not in by_inode
                assert connected_to(by_inode.values(), frozenset(inodes[:1])) == (shown,)
                assert connected_to(by_inode.values(), frozenset(inodes[1:2])) == ()
                assert connected_to(by_inode.values(), frozenset(inodes)) == ()


def test_a_bound_udp_socket_is_seen():
    """With its port and inode; once it is connected to somebody it takes nobody else."""
    with socket.socket(type=socket.SOCK_DGRAM) as bound, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as six:
        bound.bind(("127.0.0.1", 0))
        six.bind(("::1", 0))
        for end in (bound, six):
            held, port = frozenset({os.fstat(end.fileno()).st_ino}), end.getsockname()[1]
            assert quic_ports(udp_rows(), frozenset({port}), held) == (port,)
            end.connect((end.getsockname()[0], 9))
            assert quic_ports(udp_rows(), frozenset({port}), held) == ()


def test_a_port_counts_once_and_only_if_it_listens_there_with_tcp():
    """Four workers hold a socket each at one port (SO_REUSEPORT)."""
    rows = [Row("0.0.0.0", port, "0.0.0.0", 0, 7, inode) for inode, port in enumerate((443, 443, 443, 53, 8443))]
    assert quic_ports(rows, frozenset({443, 8443}), frozenset(range(4))) == (443,)


@pytest.mark.parametrize("path", ["/run/systemd/journal/stdout", "/run/dbus/system_bus_socket"])
def test_what_every_service_is_connected_to_leads_nowhere(path: str):
    """The journal and the bus."""
    assert connected_to([UnixSocket(1, "", 2), UnixSocket(2, path, 1)], frozenset({1})) == ()


@given(st.binary(max_size=200))
def test_no_answer_breaks_the_parser(data: bytes):
    """A list, None at the end, or a ValueError."""
    with suppress(ValueError):
        found = parse_unix_diag(data)
        assert found is None or all(isinstance(one, UnixSocket) for one in found)
