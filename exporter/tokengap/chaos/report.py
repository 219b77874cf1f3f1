"""The result of a run: the story, the validations, and for whom it is written: a person, a program."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokengap import __version__
from tokengap.chaos.checks import Check
from tokengap.chaos.evidence import Evidence
from tokengap.chaos.timeline import Timeline

#: Exit codes: what was promised held; it did not; (2: set-up); the fault was not there, or did not go away.
PASSED, FAILED, UNPROVEN = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Report:
    """A run that is over. ``unproven`` says why it means nothing; there is no evidence then."""

    experiment: str
    through: str
    seed: int
    timeline: Timeline
    evidence: Evidence | None = None
    checks: tuple[Check, ...] = ()
    unproven: str = ""

    @property
    def code(self) -> int:
        """The exit code."""
        if self.evidence is None:
            return UNPROVEN
        return FAILED if any(check.failed for check in self.checks) else PASSED

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.evidence is None:
            return f"FAILED, and says nothing of the system: {self.unproven}"
        failed = [check.name for check in self.checks if check.failed]
        judged = sum(check.judged for check in self.checks)
        if failed:
            return f"FAILED: {', '.join(failed)} of {judged} validations"
        return f"passed: all {judged} validations"

    def as_json(self) -> dict[str, Any]:
        """Return everything, as plain values. Times are seconds since the run began; what is endless is null."""
        zero = self.timeline.began
        result: dict[str, Any] = {
            "experiment": self.experiment,
            "through": self.through,
            "seed": self.seed,
            "tokengap": __version__,
            "exit": self.code,
            "verdict": self.verdict,
            "checks": [_finite(asdict(check)) for check in self.checks],
            "timeline": [
                {"at": _since(event.at, zero), "kind": event.kind, "text": event.text} for event in self.timeline.events
            ],
        }
        run = self.evidence
        if run is not None:
            result["phases"] = {
                name: {"start": _since(span.start, zero), "end": _since(span.end, zero)}
                for name, span in (("baseline", run.baseline), ("fault", run.fault), ("recovery", run.recovery))
            }
            result["requests"] = [
                {
                    "id": attempt.id,
                    "sent": _since(attempt.sent, zero),
                    "ended": _since(attempt.ended, zero),
                    "end": attempt.end,
                    "status": attempt.status,
                    "tokens": attempt.tokens,
                    "first_token": _since(attempt.arrivals[0], zero) if attempt.arrivals else None,
                    "detail": attempt.detail,
                }
                for attempt in run.attempts
            ]
            result["looks"] = [_finite(asdict(look)) | {"at": _since(look.at, zero)} for look in run.looks]
        return result

    def dumps(self) -> str:
        """Return the same as text."""
        return json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"

    def print(self, console: Console) -> None:
        """Print the validations and the verdict."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("", "validation", "value", "limit", ""):
            table.add_column(title, justify="right" if title in ("value", "limit") else "left", overflow="fold")
        for check in self.checks:
            table.add_row(
                mark(check), check.name, shown(check.value, check.unit), shown(check.limit, check.unit), check.said
            )
        if self.checks:
            console.print(table)
        console.print(f"{self.experiment} through {self.through}: {self.verdict}", highlight=False, soft_wrap=True)


def mark(check: Check) -> str:
    """Return a word for how it came out."""
    if not check.judged:
        return "shown"
    return "ok" if check.passed else "FAIL"


def shown(value: float | None, unit: str) -> str:
    """Return a number as people read it."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "endless"
    return f"{value:.2%}" if unit == "share" else f"{value:.3g}{f' {unit}' if unit else ''}"


def _since(at: float, zero: float) -> float:
    return round(at - zero, 3)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of which what is endless, or no number, is None: JSON has neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
