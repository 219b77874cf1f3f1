"""Network namespaces for tests, made with ``ip netns`` on a bridge to the root namespace, and always removed."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_PREFIX = "tgtest"
_counter = itertools.count()


@dataclass(frozen=True)
class Space:
    """A network namespace; ``address`` is its own on the bridge, by the interface ``outside`` in the root namespace.

    Both are empty when it has loopback only.
    """

    name: str
    address: str = ""
    outside: str = ""

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def command(self, *words: object) -> tuple[str, ...]:
        """Return a command line that runs in there; the process keeps the pid it is started with."""
        return (_ip(), "netns", "exec", self.name, *map(str, words))

    def ip(self, *words: str) -> None:
        """Run ``ip`` in there."""
        _run("-n", self.name, *words)

    def run(self, do: Callable[[], T]) -> T:
        """Call ``do`` in there, in a thread; the sockets that it makes stay in there."""
        results: list[T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                with Path(self.path).open("rb") as file:
                    if libc.setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns to {self.name}")
                results.append(do())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def connect(self, port: int, host: str = "127.0.0.1", source: tuple[str, int] | None = None) -> socket.socket:
        """Connect from in there."""
        return self.run(lambda: socket.create_connection((host, port), 10, source))

    def listen(self, port: int, host: str = "0.0.0.0") -> socket.socket:
        """Listen in there, held by this process."""
        return self.run(lambda: socket.create_server((host, port)))


class Host:
    """Makes namespaces while a test lasts. ``address`` is the root namespace's on their bridge."""

    def __init__(self, bridge: str, net: int) -> None:
        self._bridge, self._net = bridge, net
        self._made: list[Space] = []
        self.address = f"198.18.{net}.1"

    def space(self, *, address: bool = True) -> Space:
        """Make a namespace, on the bridge with an address of its own, or with loopback only."""
        number = next(_counter)
        name = f"{_PREFIX}-{os.getpid()}-{number}"
        _run("netns", "add", name)
        made = Space(name)
        if address:
            made = Space(name, f"198.18.{self._net}.{len(self._made) + 2}", f"tgv{os.getpid() % 100000}-{number}")
        self._made.append(made)
        made.ip("link", "set", "lo", "up")
        if address:
            _run("link", "add", made.outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("link", "set", made.outside, "master", self._bridge, "up")
            made.ip("addr", "add", f"{made.address}/24", "dev", "eth0")
            made.ip("link", "set", "eth0", "up")
        return made

    def remove(self, space: Space) -> None:
        """Remove a namespace; its end of the bridge goes with it when nothing is in it any more."""
        self._made.remove(space)
        _run("netns", "del", space.name)

    def _remove_all(self) -> None:
        for space in tuple(self._made):
            self.remove(space)


@contextmanager
def host() -> Iterator[Host]:
    """Make namespaces for the length of the block."""
    _ip()
    if os.geteuid() != 0:
        pytest.fail("network namespaces take root: run the tests as root")
    _remove_left_over()
    number = next(_counter)
    # 198.18.0.0/15 is for tests (RFC 2544); a process takes one of its networks after the other.
    bridge, net = f"tgb{os.getpid() % 100000}-{number}", (os.getpid() * 7 + number) % 250 + 1
    with ExitStack() as stack:
        _run("link", "add", bridge, "type", "bridge")
        stack.callback(_run, "link", "del", bridge)
        made = Host(bridge, net)
        stack.callback(made._remove_all)
        _run("addr", "add", f"{made.address}/24", "dev", bridge)
        _run("link", "set", bridge, "up")
        yield made


def _remove_left_over() -> None:
    """Remove what a test run left that was killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            subprocess.run([_ip(), "netns", "del", path.name], check=False)


def _ip() -> str:
    program = shutil.which("ip", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))
    if program is None:
        pytest.fail("ip is not installed: apt-get install iproute2")
    return program


def _run(*words: str) -> None:
    ran = subprocess.run([_ip(), *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"ip {' '.join(words)}: {ran.stderr}"
