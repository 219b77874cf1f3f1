"""The systemd unit as tests read it, and what systemd's own tables say that its filter of system calls refuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "tokengap.service"
NETNS = DEPLOY / "tokengap.service.d" / "netns.conf"
CONFIG = DEPLOY / "tokengap.yaml"


def settings(path: Path) -> dict[str, list[str]]:
    """Return what `[Service]` sets: all values of each key, in order."""
    found: dict[str, list[str]] = {}
    section = path.read_text().split("[Service]")[1].split("[Install]")[0]
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def calls(group: str) -> set[str]:
    """Return the system calls of one of systemd's groups, those of groups in it included."""
    said = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True)
    found: set[str] = set()
    for line in said.stdout.splitlines()[1:]:
        name = line.partition("#")[0].strip()
        found |= calls(name) if name.startswith("@") else {name} - {""}
    return found


def refused(filters: list[str]) -> set[str]:
    """Return the system calls that `SystemCallFilter=` lines refuse: an allow list, and then lists taken from it."""
    allowed, *taken = filters
    names = calls("@known")
    for group in allowed.split():
        names -= calls(group)
    for line in taken:
        for group in line.removeprefix("~").split():
            names |= calls(group)
    return names
