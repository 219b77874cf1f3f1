"""The Dockerfile as tests read it: its instructions, stage by stage."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from deploy.unit import ROOT

DOCKERFILE = ROOT / "Dockerfile"


@dataclass(slots=True)
class Stage:
    """One ``FROM`` and what follows: pairs of an instruction and its arguments, in order."""

    image: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == instruction]

    def only(self, instruction: str) -> str:
        (arguments,) = self.all(instruction)
        return arguments

    def json(self, instruction: str) -> Any:
        """The arguments of an instruction in its form without a shell, a HEALTHCHECK's behind CMD."""
        return json.loads(self.only(instruction).rpartition("CMD ")[2])


def stages() -> list[Stage]:
    """Return the stages; hadolint has seen to it that each line is an instruction."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            found.append(Stage(arguments))
        elif name:
            found[-1].instructions.append((name, arguments))
    return found


BUILD, FINAL = stages()
