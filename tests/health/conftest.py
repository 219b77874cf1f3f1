from __future__ import annotations

import pytest


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls does not make a server one that is too slow to be asked again at once."""
    monkeypatch.setattr("tokengap.health.look.SLOW", 60.0)
