"""LiteLLM's proxy, from PyPI, in an environment of its own: its dependencies are many, and not this package's.

1.80.5 is a release that reads streams on for clients who left (LiteLLM issue 30244, fixed by its pull request 30245).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tokengap.lab.answers import MODEL
from tokengap.lab.parts import LOOPBACK
from tokengap.lab.proxies import Proxy, Wiring

LEAKING = "1.80.5"
NEWEST = "newest"

#: The seconds that an installation may take, and a start.
_INSTALL_WITHIN, START_WITHIN = 900.0, 90.0

#: Without the first two it would ask the Internet for prices, and report that it was started.
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    # And without a key for its administrator newer ones do not start. On loopback, for a minute, there is none.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}

#: What to install, in this order, until one starts: newer releases of FastAPI have broken LiteLLM (1.95.0 with 0.165).
_REQUIREMENTS = {
    LEAKING: (("litellm[proxy]==1.80.5",), ("litellm[proxy]==1.80.5", "fastapi==0.124.4")),
    NEWEST: (("litellm[proxy]",), ("litellm[proxy]", "fastapi==0.124.4")),
}


def environment(release: str) -> Path:
    """Return the folder of the environment for a release, there or not: below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tokengap" / f"litellm-{release}"


def prepare(release: str) -> str:
    """Install a release if need be. Returns why it could not be, empty when it is there."""
    home = environment(release)
    ready = home / "works"
    if ready.exists():
        return ""
    said = ""
    for requirements in _REQUIREMENTS[release]:
        for command in (
            (sys.executable, "-m", "venv", str(home)),
            (str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *requirements),
            (str(home / "bin" / "python"), "-c", "import litellm.proxy.proxy_server"),  # does what a start does
        ):
            try:
                ran = subprocess.run(  # noqa: S603 - commands from this file
                    command,
                    capture_output=True,
                    text=True,
                    timeout=_INSTALL_WITHIN,
                    check=False,
                    env=os.environ | _ENVIRONMENT,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
                break
            if ran.returncode:
                said = (ran.stderr.strip() or ran.stdout.strip() or f"{command[0]} failed").splitlines()[-1]
                break
        else:
            ready.touch()
            return ""
    return f"LiteLLM {release} cannot be installed here: {said}"


def installed(release: str) -> str:
    """Return the version of an environment, from its metadata: the program takes seconds to tell."""
    found = environment(release).glob("lib/python*/site-packages/litellm-*.dist-info")
    return next((path.name.removeprefix("litellm-").removesuffix(".dist-info") for path in found), "unknown")


def _config(wiring: Wiring) -> str:
    return f"""\
model_list:
- model_name: {MODEL}
  litellm_params:
    model: openai/{MODEL}
    api_base: http://{LOOPBACK}:{wiring.upstream}/v1
    api_key: none
router_settings:
  num_retries: 0
"""


def _command(program: Path, wiring: Wiring) -> tuple[str, ...]:
    quiet = ("env", *(f"{name}={value}" for name, value in _ENVIRONMENT.items()))
    config = str(wiring.directory / "litellm.yaml")
    return (*quiet, str(program), "--config", config, "--host", LOOPBACK, "--port", str(wiring.listen))


def litellm(release: str) -> Proxy:
    """Return LiteLLM's proxy of a release: :data:`LEAKING` or :data:`NEWEST`. :func:`prepare` installs it."""

    def find() -> Path | None:
        program = environment(release) / "bin" / "litellm"
        return program if program.exists() else None

    return Proxy(
        name=f"litellm-{release}",
        install="tokengap drill --matrix --litellm",
        find=find,
        version_command="--version",
        config_name="litellm.yaml",
        config=_config,
        command=_command,
        leaks="1.80.5: as it is, reads every answer to its end; newer ones those that are not streamed",
        ready_within=START_WITHIN,
    )
