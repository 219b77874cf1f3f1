"""``deploy/compose.yml``, as docker compose reads it; no engine runs it here. Grafana's provisioning beside it."""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
import yaml

from deploy.image import DOCKERFILE, FINAL
from deploy.unit import DEPLOY, ROOT
from tokengap import __version__
from tokengap.lab.pager import PORT
from tokengap.lab.stack import Ports, stack_parts

pytestmark = pytest.mark.e2e

PROVISIONING = DEPLOY / "grafana" / "provisioning"


@pytest.fixture(scope="module")
def services() -> dict[str, dict]:
    """What compose makes of it, in full."""
    compose = Path(sys.executable).parent / "docker-compose"
    command = [compose, "-f", DEPLOY / "compose.yml", "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)["services"]


def test_everything_is_there(services):
    """Each file that is mounted, and the Dockerfile of what is built."""
    sources = [volume["source"] for service in services.values() for volume in service.get("volumes", ())]
    assert len(sources) == 5
    assert [source for source in sources if not Path(source).exists()] == []
    built = services["demo"]["build"]
    assert Path(built["context"], built["dockerfile"]).resolve() == DOCKERFILE


def test_images_are_pinned(services):
    """To a release, ours to this one."""
    images = {service["image"] for service in services.values()}
    assert f"tokengap:{__version__}" in images
    assert [image for image in images if not re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", image)] == []


def test_each_has_a_health_check_and_nothing_waits_for_one_that_has_not(services):
    """The demo has its image's."""
    checked = {name for name, service in services.items() if service.get("healthcheck")}
    assert FINAL.only("HEALTHCHECK")
    assert checked == services.keys() - {"demo"}


def test_nothing_listens_beyond_loopback(services, tmp_path: Path):
    """All are in the host's network, so each says so itself: as in `make demo-stack`, but for where files lie."""
    assert {service["network_mode"] for service in services.values()} == {"host"}
    for part in stack_parts(DEPLOY, tmp_path, Ports())[:2]:
        command = services[part.name]["command"]
        flags = [{flag.partition("=")[0]: flag for flag in given} for given in (part.command[1:], command)]
        assert flags[0].keys() == flags[1].keys()
        listening = [flag for flag in command if "listen-address" in flag]
        assert listening == [flag for flag in part.command if "listen-address" in flag]
        assert all(re.fullmatch(r"--\S+=(127\.0\.0\.1:\d+)?", flag) for flag in listening)
    assert services["pager"]["command"] == ["--port", f"{PORT}"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert services["demo"]["command"] == ["demo"]


def test_configurations_find_each_other(services):
    """Rules lie beside Prometheus' configuration as in the repository, dashboards where Grafana is told to look."""
    places = {v["source"]: v["target"] for service in services.values() for v in service.get("volumes", ())}
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    inside = PurePosixPath(places[str(DEPLOY / "prometheus.yml")]).parent / rules
    assert posixpath.normpath(inside) == f"{places[str(ROOT / 'alerts')]}/*.yml"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "tokengap.yml").read_text())["providers"]
    assert provider["options"]["path"] == places[str(ROOT / "dashboards")]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "dashboards" / Path(home).name).exists()
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://localhost:9090", True)
