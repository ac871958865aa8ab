"""Rules and dashboard name what the installed Ray and vLLM count, and say what PromQL can read."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from raysd.deployment.observability import RECORDS, dashboard, rules, write_observability

SHIPPED = Path(__file__).parents[2] / "clusters" / "observability"
FLOOR, MINUTES = 1.3, 30


def expressions() -> list[str]:
    found = [rule["expr"] for group in rules(FLOOR, MINUTES)["groups"] for rule in group["rules"]]
    found += [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    return [expression.replace("$model", ".*") for expression in found]


def exported() -> set[str]:
    """The names that Ray exports of metrics of its own and of vLLM's, read from their sources: to import vLLM takes seconds."""
    names: set[str] = set()
    for package, folder in (("vllm", "v1"), ("ray", "serve")):
        for path in (Path(importlib.util.find_spec(package).origin).parent / folder).rglob("*.py"):
            names |= set(_defined(path.read_text(encoding="utf-8")))
    return names


def _defined(source: str) -> Iterator[str]:
    kind = r"(?P<kind>Counter|Gauge|Histogram|_counter_cls|_gauge_cls|_histogram_cls)"
    for match in re.finditer(kind + r"\(\s*(?:name=)?\"(?P<name>(?:vllm:|serve_)[a-z_]+)\"", source):
        name = "ray_" + match["name"].replace(":", "_")
        if match["kind"].lower().strip("_").startswith("counter"):
            yield name + "_total"
        elif match["kind"].lower().strip("_").startswith("histogram"):
            yield from (name + suffix for suffix in ("_bucket", "_sum", "_count"))
        else:
            yield name
    if "counter_specs" in source:  # vllm/v1/spec_decode/metrics.py makes its counters from a list of names
        yield from (f"ray_{name.replace(':', '_')}_total" for name in re.findall(r"\(\"(vllm:[a-z_]+)\", ", source))


def test_every_metric_is_one_that_the_installed_ray_and_vllm_export():
    used = {name for expression in expressions() for name in re.findall(r"\b(?:ray|raysd)[_:][a-z_:]+", expression)}
    assert len(used) > 15
    assert used <= exported() | set(RECORDS), used - exported() - set(RECORDS)


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_is_promql(expression):
    promql_parser.parse(expression)


def test_a_replica_is_reported_below_the_floor_that_serve_asks_for():
    alerts = {rule["alert"]: rule for group in rules(1.75, 12.5)["groups"] for rule in group["rules"] if "alert" in rule}
    below = alerts["RaysdAcceptanceBelowFloor"]
    assert below["expr"] == "raysd:acceptance_length < 1.75" and below["for"] == "750s"
    assert all(rule["annotations"]["summary"] and rule["annotations"]["description"] and rule["for"] for rule in alerts.values())


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert sorted(panel["id"] for panel in panels) == list(range(1, len(panels) + 1))
    cells = [(x, y) for panel in panels for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
             for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])]
    assert len(set(cells)) == len(cells)


def test_what_clusters_holds_is_what_the_code_makes(tmp_path):
    write_observability(tmp_path, FLOOR, MINUTES)
    for name in ("rules.yaml", "dashboard.json"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (SHIPPED / name).read_text(encoding="utf-8"), "run `make observability`"
    assert yaml.safe_load((SHIPPED / "rules.yaml").read_text(encoding="utf-8")) == rules(FLOOR, MINUTES)
    assert json.loads((SHIPPED / "dashboard.json").read_text(encoding="utf-8")) == dashboard()
