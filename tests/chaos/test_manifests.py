"""Objects for clusters: what is rendered is right by strict schemas, and what people get wrong is refused by them."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml

from lab.commands import tokengap
from tokengap.bundle.site import Site
from tokengap.chaos.experiments import EXPERIMENTS
from tokengap.chaos.manifests import Cluster, files, github, gitlab, litmus, mesh, probes

SCHEMA = yaml.safe_load(Path(__file__).with_name("crds.yaml").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

CRASH, _, PARTITION = litmus(Site(), Cluster())
PODS, _, NETWORK, *_ = mesh(Cluster())


def documents() -> list[tuple[str, Any]]:
    return [(file.path, yaml.safe_load(file.text)) for file in files(Site(), Cluster())]


OBJECTS = [(path, document) for path, document in documents() if path.startswith(("litmus/", "chaos-mesh/"))]


@pytest.mark.parametrize(("path", "document"), OBJECTS, ids=[path for path, _ in OBJECTS])
def test_what_is_rendered_is_what_the_cluster_knows(path, document):
    """Every field of it, with its type, and read back from the text."""
    assert [error.message for error in VALIDATOR.iter_errors(document)] == []


#: The manifest of the article that this project follows: no such kind has these fields.
ARTICLE = yaml.safe_load("""
apiVersion: litmuschaos.io/v1alpha1
kind: ChaosExperiment
metadata: {name: llm-engine-crash}
spec:
  appinfo: {appns: llm, applabel: app=vllm, appkind: deployment}
  chaosConfig: {signal: SIGBUS, duration: 60s}
""")


def probe(engine: Any) -> Any:
    return engine["spec"]["experiments"][0]["spec"]["probe"][1]


def variables(engine: Any) -> Any:
    return engine["spec"]["experiments"][0]["spec"]["components"]["env"]


WRONG: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "the article's": (ARTICLE, lambda _: None, "'ChaosExperiment' is not one of"),
    "a ChaosEngine with chaosConfig": (
        CRASH,
        lambda o: o["spec"].update(chaosConfig={}),
        "'chaosConfig' was unexpected",
    ),
    "engineStat": (CRASH, lambda o: o["spec"].update(engineStat="active"), "'engineStat' was unexpected"),
    "no service account": (CRASH, lambda o: o["spec"].pop("chaosServiceAccount"), "is a required property"),
    "mode eot": (CRASH, lambda o: probe(o).update(mode="eot"), "'eot' is not one of"),
    "probeTimeout 5": (CRASH, lambda o: probe(o)["runProperties"].update(probeTimeout=5), "5 is not of type 'string'"),
    "an int as a variable": (CRASH, lambda o: variables(o)[0].update(value=60), "60 is not of type 'string'"),
    "a query in quotes": (
        CRASH,
        lambda o: probe(o)["promProbe/inputs"].update(query='max(x{a="b"})'),
        "does not match",
    ),
    "a limit that is no number": (
        CRASH,
        lambda o: probe(o)["promProbe/inputs"]["comparator"].update(value="two"),
        "'two' does not match",
    ),
    "a comparator's type": (
        CRASH,
        lambda o: probe(o)["promProbe/inputs"]["comparator"].update(type="float"),
        "'type' was unexpected",
    ),
    "a signal in PodChaos": (PODS, lambda o: o["spec"].update(action="signal"), "'signal' is not one of"),
    "no mode": (PODS, lambda o: o["spec"].pop("mode"), "'mode' is a required property"),
    "labelSelector": (
        PODS,
        lambda o: o["spec"]["selector"].update(labelSelector={}),
        "'labelSelector' was unexpected",
    ),
    "every pod": (PODS, lambda o: o["spec"].update(selector={}), "'namespaces' is a required property"),
    "no container": (PODS, lambda o: o["spec"].pop("containerNames"), "'containerNames' is a required property"),
    "a loss in numbers": (NETWORK, lambda o: o["spec"].update(value=30), "30 is not of type 'string'"),
    "the wrong group": (PODS, lambda o: o.update(apiVersion="litmuschaos.io/v1alpha1"), "was expected"),
}


@pytest.mark.parametrize(("right", "spoil", "said"), WRONG.values(), ids=WRONG)
def test_what_people_get_wrong_is_refused(right, spoil, said):
    """By these schemas; a cluster would take most of it, and do nothing or something else."""
    wrong = copy.deepcopy(right)
    spoil(wrong)
    assert any(said in error.message for error in VALIDATOR.iter_errors(wrong))


def test_probes_ask_for_rules_that_are_rendered_with_them():
    """By their bare names: a query of a promProbe passes through a shell."""
    rules = dict(documents())["prometheus/tokengap-chaos.rules.yml"]["groups"][0]["rules"]
    asked = {each["promProbe/inputs"]["query"] for each in CRASH["spec"]["experiments"][0]["spec"]["probe"][1:]}
    assert asked == {rule["record"] for rule in rules}
    for rule in rules:
        promql_parser.parse(rule["expr"])


def one_series(expr: str, value: float) -> dict[str, Any]:
    return {"expr": f"count({expr})", "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}


@pytest.mark.parametrize(
    ("series", "known"),
    [
        ({}, {}),
        (
            {
                'tokengap_engine_state{engine="a",state="busy"}': "1x10",
                'tokengap_queue_age_seconds{engine="a"}': "2x10",
            },
            {"tokengap:chaos_engines_well:min": 1, "tokengap:chaos_queue_age_seconds:max": 2},
        ),
    ],
    ids=["nothing is scraped", "one engine is"],
)
def test_each_rule_is_one_series_whatever_there_is(series, known, tmp_path: Path):
    """Without anything to record it is no number (NaN, which differs from itself), and fails the probe."""
    rendered = next(file for file in files(Site(), Cluster()) if file.path.endswith("rules.yml"))
    (tmp_path / "rules.yml").write_text(rendered.text)
    names = [each.record for each in probes(Site())]
    tests = [one_series(name, 1) for name in names]
    tests += [one_series(f"{name} == {known[name]}" if name in known else f"{name} != {name}", 1) for name in names]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    unit = {
        "rule_files": ["rules.yml"],
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(unit))
    ran = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_ci_runs_experiments_that_there_are():
    """Each in a job of its own, whose report is kept whatever came out."""
    assert set(github()["jobs"]["chaos"]["strategy"]["matrix"]["experiment"]) <= set(EXPERIMENTS)
    assert github()["jobs"]["chaos"]["steps"][-1]["if"] == "always()"
    assert set(gitlab()["chaos"]["parallel"]["matrix"][0]["EXPERIMENT"]) <= set(EXPERIMENTS)
    assert "on" in yaml.safe_load(next(file.text for file in files(Site(), Cluster()) if "github" in file.path))


def test_a_workflow_calls_what_it_has():
    """Its entry, and the children of each template."""
    (workflow,) = (each for each in mesh(Cluster()) if each["kind"] == "Workflow")
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    called = {workflow["spec"]["entry"]} | {child for each in templates.values() for child in each.get("children", ())}
    assert called == set(templates)


@pytest.mark.e2e
async def test_they_are_written_where_asked(tmp_path: Path):
    """With a site's own names; a label that is none is refused before anything is written."""
    ran = await tokengap("chaos", "manifests", "--out", tmp_path / "wrong", "--engines", "vllm")
    assert ran.code == 2
    assert "--engines 'vllm'; expected a label such as app=vllm" in ran.err
    assert not (tmp_path / "wrong").exists()
    ran = await tokengap("chaos", "manifests", "--out", tmp_path, "--engines", "model=llama", "--namespace", "prod")
    assert ran.code == 0
    assert {Path(line).relative_to(tmp_path).as_posix() for line in ran.out.splitlines()} == {
        path for path, _ in documents()
    }
    crash = yaml.safe_load((tmp_path / "chaos-mesh/engine-crash.yaml").read_text())
    assert crash["spec"]["selector"] == {"namespaces": ["prod"], "labelSelectors": {"model": "llama"}}
