"""deploy/grafana and deploy/prometheus query only metrics that a real server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import make_dashboard
from tests.serving.scrapes import busy_scrapes

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = (PROMETHEUS / "rules.yml").read_text()
RECORDED = set(re.findall(r"- record: (\S+)", RULES))
DASHBOARD = json.loads(make_dashboard.PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
NAME = r"(?<![\w:$])(?:instance:)?(?:gimbal|process)_[a-z0-9_:]+"
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def check(*command: str, cwd: Path = PROMETHEUS) -> str:
    done = subprocess.run(["promtool", *command], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown() -> dict[str, set[str]]:
    """Return the label values of each metric of a busy server, including families without samples."""
    server, found = busy_scrapes()
    metrics: dict[str, set[str]] = {name: set() for name in re.findall(r"# TYPE (\S+)", server.texts[-1])}
    for name, *labels in found:
        metrics.setdefault(name, set()).update(labels)
    return metrics


def test_dashboard_file_is_up_to_date():
    assert make_dashboard.dashboard() == DASHBOARD


@pytest.mark.parametrize("text", [*EXPRESSIONS, *QUERIES, RULES], ids=lambda text: text[:60])
def test_every_queried_metric_exists(text: str):
    names = set(re.findall(NAME, text))
    assert names and names <= shown().keys() | RECORDED


def test_every_queried_label_value_exists():
    pairs = {
        (name, value)
        for text in [*EXPRESSIONS, RULES]
        for name, labels in re.findall(rf"({NAME})\{{([^}}]*)\}}", text)
        for value in re.findall(r'[a-z_]+="([^"$]+)"', labels)
    }
    assert ("gimbal_time_to_first_token_seconds_bucket", "2.5") in pairs and len(pairs) >= 3
    metrics = shown()
    assert {(name, value) for name, value in pairs if value not in metrics[name]} == set()


def test_every_engine_metric_has_an_aggregate():
    metrics = shown()
    alone = {name for name in metrics if name.startswith("gimbal_engine_")}
    missing = {name for name in alone if name.replace("gimbal_engine_", "gimbal_") not in metrics}
    assert missing == {"gimbal_engine_dispatch_score"}  # summands of one decision add up to nothing


def test_panels_do_not_overlap():
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == [
        "Requests", "Latency", "Engines", "Dispatch", "Placement", "Process",
    ]  # fmt: skip
    places = {
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in DASHBOARD["panels"])
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@promtool
def test_dashboard_expressions_parse(tmp_path: Path):
    variables = {"$__rate_interval": "5m", "$__range": "1h"}
    rules = []
    for number, expression in enumerate(EXPRESSIONS):
        for name, value in variables.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"a{number}", "expr": expression})
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in check("check", "rules", "rules.yml", cwd=tmp_path)


@promtool
def test_rules_are_valid_and_fire_as_specified():
    assert "SUCCESS" in check("check", "rules", "rules.yml")
    assert "SUCCESS" in check("check", "config", "prometheus.yml")
    assert "SUCCESS" in check("test", "rules", "rules_test.yml")
