"""The decoding of netlink messages: recorded ones, altered ones, and bytes that are none."""

from __future__ import annotations

import errno
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokengap.errors import SourceUnusable
from tokengap.readings import CLOSE, CLOSE_WAIT, ESTABLISHED, SOCKET, UNKNOWN, SocketTable
from tokengap.sources import sock_diag
from tokengap.sources.sock_diag import Dumper, DumpInterrupted, Ports, decode, ended

RECORDED = Path(__file__).parent.parent / "recorded" / "sock_diag-6.18"
DUMP = (RECORDED / "dump.bin").read_bytes()
DESTROYED = (RECORDED / "destroyed.bin").read_bytes()

LOCALHOST_V4 = 0xFFFF_7F00_0001
LOCALHOST_V6 = 1
PORTS = Ports(frozenset({8080, 8081, 8082}), frozenset({8080, 8081, 8082}))
#: Time is bounded by what a test asserts, not by what else this machine does.
unhurried = settings(max_examples=200, deadline=None)
DONE = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)


def messages(buffer: bytes) -> list[bytes]:
    """Cut netlink bytes into messages."""
    cut = []
    while buffer:
        (length,) = struct.unpack_from("=I", buffer)
        cut.append(buffer[: (length + 3) & ~3])
        buffer = buffer[(length + 3) & ~3 :]
    return cut


def attributes(message: bytes) -> list[tuple[int, bytes]]:
    """Cut a socket message's attributes into (type, payload)."""
    found, at = [], 88
    while at < len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        found.append((kind, message[at + 4 : at + size]))
        at += (size + 3) & ~3
    return found


def rebuilt(message: bytes, contents: list[tuple[int, bytes]], flags: int = 2) -> bytes:
    """Return a socket message with other attributes."""
    tail = b"".join(
        struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4) for kind, payload in contents
    )
    return struct.pack("=IHHII", 88 + len(tail), 20, flags, 1, 0) + message[16:88] + tail


def cut_info(message: bytes, size: int) -> bytes:
    """Return a socket message as a kernel with a shorter ``tcp_info`` would have sent it."""
    return rebuilt(message, [(kind, data[:size] if kind == 2 else data) for kind, data in attributes(message)])


def by_ports(table: SocketTable) -> dict[tuple[int, int], np.void]:
    return {(int(row["sport"]), int(row["dport"])): row for row in table}


class FakeLink:
    """A kernel that answers each request with the next of the given dumps, a part at a time."""

    def __init__(self, *dumps: list[bytes]) -> None:
        self.dumps = list(dumps)
        self.requests: list[bytes] = []
        self.parts: list[bytes] = []

    def send(self, data: bytes, /) -> int:
        self.requests.append(data)
        self.parts = list(self.dumps.pop(0))
        return len(data)

    def recv_into(self, buffer: memoryview, _nbytes: int, _flags: int, /) -> int:
        if not self.parts:
            raise BlockingIOError
        part = self.parts.pop(0)
        buffer[: len(part)] = part[: len(buffer)]
        return len(part)

    def close(self) -> None: ...


def error(number: int) -> list[bytes]:
    return [struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -number) + bytes(16)]


# --- recorded -------------------------------------------------------------------------------------------------------


def test_recorded_dump_gives_every_socket_with_its_counters() -> None:
    """Both families and a v4-mapped client come out with the bytes that were sent; an unread FIN counts as one."""
    rows = by_ports(decode(DUMP))
    assert len(rows) == 5
    server = next(row for (sport, _), row in rows.items() if sport == 8080)
    assert server["state"] == ESTABLISHED
    assert (server["bytes_sent"], server["bytes_acked"], server["bytes_received"]) == (1077, 1077, 100)
    assert (server["src_hi"], server["src_lo"], server["dst_lo"]) == (0, LOCALHOST_V4, LOCALHOST_V4)
    client = rows[int(server["dport"]), 8080]
    assert client["rqueue"] == 77
    assert (client["bytes_sent"], client["bytes_acked"]) == (100, 101)
    half_closed = next(row for (sport, _), row in rows.items() if sport == 8081)
    assert half_closed["state"] == CLOSE_WAIT
    assert (half_closed["src_hi"], half_closed["src_lo"], half_closed["dst_lo"]) == (0, LOCALHOST_V6, LOCALHOST_V6)
    assert (half_closed["bytes_received"], half_closed["rqueue"]) == (201, 1)
    mapped = next(row for (sport, _), row in rows.items() if sport == 8082)
    assert (mapped["src_lo"], mapped["dst_lo"], mapped["bytes_sent"]) == (LOCALHOST_V4, LOCALHOST_V4, 3000)
    assert len({int(row["cookie"]) for row in rows.values()}) == 5
    assert all(90 <= row["last_data_recv"] <= 250 and row["rto_us"] == 204_000 for row in rows.values())


def test_recorded_destroy_events_keep_the_final_counters_under_the_same_cookies() -> None:
    """A destroyed socket has the cookie of its dumped row, state CLOSE, no inode, and its last counters."""
    before = {int(row["cookie"]): row for row in decode(DUMP)}
    after = {int(row["cookie"]): row for row in decode(DESTROYED)}
    assert before.keys() == after.keys()
    for cookie, row in after.items():
        assert (row["state"], row["inode"]) == (CLOSE, 0)
        for name in ("sport", "dport", "src_lo", "dst_lo", "bytes_sent"):
            assert row[name] == before[cookie][name]
    assert {int(row["sport"]): int(row["bytes_received"]) for row in after.values() if row["sport"] < 10_000} == {
        8080: 100,
        8081: 201,
        8082: 301,
    }


def test_no_bytes_are_no_sockets() -> None:
    """Nothing received is an empty table, not an error."""
    assert len(decode(b"")) == 0
    assert not ended(b"")
    assert ended(DUMP)


# --- shapes of messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 2, 3, 60, 104, 127, 128, 136, 144, 148, 184, 199, 208, 232, 280, 400])
def test_a_shorter_tcp_info_leaves_the_later_columns_unknown(size: int) -> None:
    """A field of which one byte is missing is UNKNOWN, never 0; the fields before it are as they were."""
    whole = decode(DUMP)
    messages_ = [cut_info(m, size) if len(m) > 88 else m for m in messages(DUMP)]
    table = decode(b"".join(messages_))
    assert len(table) == len(whole)
    for name, kind, offset in sock_diag.TCP_INFO_FIELDS:
        if offset + int(kind[1]) <= size:
            assert (table[name] == whole[name]).all(), name
        else:
            assert (table[name] == UNKNOWN).all(), name
    for name in ("cookie", "sport", "dport", "src_lo", "dst_lo", "rqueue", "wqueue", "inode", "state"):
        assert (table[name] == whole[name]).all(), name


def test_a_message_without_tcp_info_has_unknown_counters() -> None:
    """Attributes may be missing altogether."""
    bare = rebuilt(messages(DUMP)[0], [])
    (row,) = decode(bare + DONE)
    assert row["sport"] in (8080, 8082) or row["dport"] in (8080, 8082)
    assert row["bytes_acked"] == row["retransmits"] == UNKNOWN


def test_messages_that_alternate_in_length_and_layout_keep_their_own_counters() -> None:
    """tcp_info is found in each message where it is, whatever its neighbours look like, also at equal lengths."""
    plain = messages(DUMP)[0]
    parts = attributes(plain)
    info = next(data for kind, data in parts if kind == 2)

    def numbered(number: int) -> bytes:
        counted = info[:120] + struct.pack("=Q", number) + info[128:]
        orders = [
            [(8, b"\0"), (2, counted)],
            [(2, counted), (8, b"\0")],  # the same length, another place
            [(19, bytes(24)), (8, b"\0"), (2, counted)],
            [(15, bytes(4)), (2, counted)],  # the same length as the first, another attribute before it
            [(2, counted[:192]), (8, b"\0"), (30, bytes(84))],  # the same length, a shorter tcp_info
        ]
        return rebuilt(plain, orders[number % len(orders)])

    table = decode(b"".join(map(numbered, range(2000))) + DONE)
    assert sorted(table["bytes_acked"].tolist()) == list(range(2000))
    assert (table["bytes_sent"] == UNKNOWN).sum() == 400


def test_lengths_that_alternate_are_still_read_by_the_column() -> None:
    """A mixture of lengths (sockets with and without kernel TLS) is split per message, and costs no step per column."""
    plain = messages(DUMP)[0]
    longer = rebuilt(plain, [*attributes(plain), (19, bytes(24))])
    start = time.thread_time()
    assert len(decode((plain + longer) * 4500)) == 9000
    assert time.thread_time() - start < 0.3  # about 20 ms; by the row and column it would be over a second


def test_counters_beyond_63_bits_are_cut() -> None:
    """The kernel's u64 does not wrap into a negative, which would read as unknown."""
    plain = messages(DUMP)[0]
    info = next(data for kind, data in attributes(plain) if kind == 2)
    (row,) = decode(rebuilt(plain, [(2, info[:120] + b"\xff" * 8 + info[128:])]))
    assert row["bytes_acked"] == 2**63 - 1


# --- what the kernel says instead of rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM, errno.EINVAL, 2**31 - 1, 2**31])
def test_an_error_answer_is_an_oserror_with_its_number(number: int) -> None:
    """NLMSG_ERROR carries a negative error number."""
    with pytest.raises(OSError, match=r".") as caught:
        decode(error(number)[0] if number < 2**31 else struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -(2**31)))
    assert caught.value.errno == min(number, 2**31 - 1)


def test_an_acknowledgement_and_noop_are_not_errors() -> None:
    """NLMSG_ERROR with 0 is an acknowledgement, NLMSG_NOOP is nothing."""
    assert len(decode(error(0)[0] + struct.pack("=IHHII", 16, 1, 0, 0, 0) + DUMP)) == 5


def test_a_dump_that_ends_with_an_error_is_refused() -> None:
    """NLMSG_DONE may carry an error number too."""
    with pytest.raises(OSError, match="Cannot allocate"):
        decode(messages(DUMP)[0] + struct.pack("=IHHIIi", 20, 3, 2, 1, 0, -errno.ENOMEM))


def test_overrun_is_unusable() -> None:
    """NLMSG_OVERRUN says that rows were lost."""
    with pytest.raises(SourceUnusable, match="OVERRUN"):
        decode(struct.pack("=IHHII", 16, 4, 0, 0, 0))


FIRST = messages(DUMP)[0]
INTERRUPTED_ROW = [rebuilt(FIRST, attributes(FIRST), flags=0x2 | 0x10), DONE]
INTERRUPTED_END = [FIRST, struct.pack("=IHHIIi", 20, 3, 0x2 | 0x10, 1, 0, 0)]


@pytest.mark.parametrize("interrupted", [INTERRUPTED_ROW, INTERRUPTED_END], ids=["in a row", "at the end"])
def test_an_interrupted_dump_is_read_again(interrupted: list[bytes]) -> None:
    """One interruption is repaired by a second dump; both families are asked again."""
    link = FakeLink(interrupted, [DUMP], [DONE])
    assert len(Dumper().dump(link, PORTS)) == 5
    assert len(link.requests) == 3


def test_a_dump_that_is_interrupted_every_time_is_given_up() -> None:
    """Retries are bounded, and the reason is told."""
    link = FakeLink(*[INTERRUPTED_ROW] * 20)
    with pytest.raises(DumpInterrupted, match="NLM_F_DUMP_INTR"):
        Dumper().dump(link, PORTS)
    assert len(link.requests) == 3


def test_a_dump_that_stops_early_is_no_dump() -> None:
    """Without NLMSG_DONE rows are missing: that must not look like sockets that went away."""
    with pytest.raises(SourceUnusable, match="stopped before its end"):
        Dumper().dump(FakeLink(messages(DUMP)[:2]), PORTS)


def test_a_datagram_that_was_cut_is_unusable() -> None:
    """MSG_TRUNC tells the real length; what does not fit is not half-read."""
    with pytest.raises(SourceUnusable, match="datagram"):
        Dumper().dump(FakeLink([bytes(70_000)]), PORTS)


def test_a_kernel_without_equality_gets_ranges_and_is_asked_so_from_then_on() -> None:
    """S_EQ and D_EQ answer EINVAL before 4.16: the same ports as >= and <=, without asking in vain again."""
    link = FakeLink(error(errno.EINVAL), [DUMP], [DONE], [DUMP], [DONE])
    dumper = Dumper()
    assert len(dumper.dump(link, PORTS)) == 5
    assert len(dumper.dump(link, PORTS)) == 5
    assert link.dumps == []
    assert sock_diag.dump_program(PORTS, equal=False) in link.requests[1]


def test_a_second_einval_is_told() -> None:
    """A kernel that takes neither program is not asked for ever."""
    with pytest.raises(OSError, match="Invalid argument"):
        Dumper().dump(FakeLink(*[error(errno.EINVAL)] * 5), PORTS)


def test_no_ports_ask_nothing() -> None:
    """Without a topology there is nothing to dump."""
    link = FakeLink()
    assert len(Dumper().dump(link, Ports(frozenset(), frozenset()))) == 0
    assert link.requests == []


def test_the_inbox_grows_with_the_dump() -> None:
    """More sockets than the buffer holds are all received."""
    part = messages(DUMP)[0] * 80
    rows = Dumper().dump(FakeLink([*[part] * 100, DONE], [DONE]), PORTS)
    assert len(rows) == 8000


# --- bytes that are no messages -------------------------------------------------------------------------------------


def read(buffer: bytes) -> SocketTable | None:
    """Decode within a second into a table, or refuse with one of the two documented errors."""
    start = time.thread_time()
    try:
        table = decode(buffer)
    except (OSError, SourceUnusable):
        return None
    finally:
        assert time.thread_time() - start < 1.0
    assert table.dtype == SOCKET
    return table


@unhurried
@given(st.binary(max_size=600))
def test_any_bytes_are_a_table_or_refused(buffer: bytes) -> None:
    """decode() neither crashes nor hangs nor reads outside, whatever it is given."""
    read(buffer)


@unhurried
@given(st.integers(0, len(DUMP)))
def test_a_dump_cut_anywhere_gives_whole_rows_or_is_refused(size: int) -> None:
    """No row is made up from the beginning of a message."""
    table = read(DUMP[:size])
    boundaries = np.cumsum([0, *map(len, messages(DUMP))])
    assert (table is not None) == (size in boundaries)


@unhurried
@given(
    st.lists(
        st.tuples(st.integers(0, len(DUMP) - 1), st.sampled_from([0, 1, 2, 3, 4, 8, 16, 20, 127, 128, 255])),
        min_size=1,
        max_size=8,
    )
)
def test_a_dump_with_altered_bytes_is_a_table_or_refused(changes: list[tuple[int, int]]) -> None:
    """Lengths, types, flags and attributes that lie do no harm."""
    buffer = bytearray(DUMP)
    for at, value in changes:
        buffer[at] = value
    table = read(bytes(buffer))
    assert table is None or len(table) <= len(buffer) // 88


@unhurried
@given(st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=300)), max_size=6), st.integers(0, 6))
def test_any_attributes_are_walked(contents: list[tuple[int, bytes]], repeat: int) -> None:
    """Unknown, repeated and oddly long attributes are passed over; the row's own fields stay right."""
    message = rebuilt(messages(DUMP)[0], contents)
    table = read(message * repeat)
    assert table is not None
    assert len(table) == repeat
    assert (table["sport"] == decode(messages(DUMP)[0])["sport"]).all()


# --- what is asked --------------------------------------------------------------------------------------------------


def run_program(program: bytes, sport: int, dport: int) -> bool:
    """Interpret a dump program as ``inet_diag_bc_run()`` of net/ipv4/inet_diag.c does."""
    at, left = 0, len(program)
    while left > 0:
        code, yes, no = struct.unpack_from("=BBH", program, at)
        port = struct.unpack_from("=BBH", program, at + 4)[2] if code != 1 else 0
        passed = {1: False, 2: sport >= port, 3: sport <= port, 4: dport >= port, 5: dport <= port}
        passed |= {11: sport == port, 12: dport == port}
        step = yes if passed[code] else no
        at, left = at + step, left - step
    return left == 0


@unhurried
@given(
    st.frozensets(st.integers(1, 65535), max_size=5),
    st.frozensets(st.integers(1, 65535), max_size=5),
    st.booleans(),
    st.data(),
)
def test_the_dump_program_passes_exactly_the_watched_ports(
    listening: frozenset[int], targets: frozenset[int], equal: bool, data: st.DataObject
) -> None:
    """Local port listened on or remote port a target, in both dialects, also next to the edge of a range."""
    near = sorted({p + d for p in listening | targets for d in (-1, 0, 1)} | {1, 65535})
    sport, dport = data.draw(st.sampled_from(near)), data.draw(st.sampled_from(near))
    program = sock_diag.dump_program(Ports(listening, targets), equal=equal)
    if program:
        assert run_program(program, sport, dport) == (sport in listening or dport in targets)


def test_requests_are_as_the_header_files_say() -> None:
    """struct nlmsghdr, struct inet_diag_req_v2 (56 bytes), then the program as attribute 1."""
    request = sock_diag.dump_request(2, b"\x0b\x08\x0c\x00\x00\x00\x90\x1f")
    assert struct.unpack_from("=IHH", request) == (len(request), 20, 0x301)
    assert struct.unpack_from("=BBBBI", request, 16) == (2, 6, 2, 0, 1 << 1 | 1 << 8 | 1 << 4)
    assert struct.unpack_from("=HH", request, 72) == (12, 1)
    assert len(request) == 16 + 56 + 12
