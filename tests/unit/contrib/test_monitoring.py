"""The dashboard and the alert rules: made of metrics that are there, and explained."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from manyhands.monitor.picture import PeerRow, Point, RunPicture
from manyhands.monitor.web.prometheus import as_metrics
from tests.unit.contrib.commands import CONTRIB, ROOT
from tests.unit.contrib.metric_names import METRICS

MONITORING = CONTRIB / "monitoring"
PAGE = ROOT / "docs" / "how-to" / "run-for-a-month.md"


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bmanyhands_\w+", text))


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    loaded: list[dict[str, Any]] = group["rules"]
    return loaded


def test_dashboard_and_rules_use_exactly_the_known_metrics() -> None:
    text = json.dumps(dashboard()) + json.dumps(rules())
    assert metrics_in(text) == METRICS


def test_monitors_export_all_metrics() -> None:
    picture = RunPicture(
        run_id="r", time=1.0, step=1, eta_s=1.0, num_peers=1, samples_per_second=1.0, peers=[PeerRow(peer_id="A")],
        last=Point(time=1.0, step=1, loss=1.0, heldout_loss=1.0),
    )  # fmt: skip
    exported = metrics_in(as_metrics(picture, num_aborted=0, num_pages=0).decode())
    assert exported >= METRICS


def test_the_dashboard_asks_the_chosen_prometheus_for_the_chosen_runs() -> None:
    loaded = dashboard()
    variables = {variable["name"]: variable for variable in loaded["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["datasource"]["type"] == "datasource"
    assert variables["run_id"]["datasource"]["uid"] == "${datasource}"
    for panel in loaded["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            for selector in re.findall(r"manyhands_\w+(\{[^}]*\})?", target["expr"]):
                assert selector == '{run_id=~"$run_id"}', target["expr"]


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_each_alert_says_what_it_is_about_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
    explained = re.findall(r"^\| `(Manyhands\w+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(names)


def test_prometheus_is_told_of_the_job_and_of_the_rules() -> None:
    settings = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    (job,) = settings["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in json.dumps(rules()).replace("\\", "")
    assert f'up{{job="{job["job_name"]}"}}' in json.dumps(dashboard()).replace("\\", "")
    assert settings["rule_files"] == ["alerts.yaml"]
