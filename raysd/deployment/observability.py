"""What Prometheus and Grafana are told to watch of served drafts: rules and a dashboard, as data.

Ray exports the metrics of its own as `ray_NAME`, and vLLM's, which a replica counts through Ray, with an underscore for each colon (vllm/v1/metrics/ray_wrappers.py);
counters get `_total`. Each replica of Serve has its `ReplicaId`. AL is 1 + accepted / drafts over a time, never an average of ratios.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RATE = "5m"
"""Over so long rates are taken: twenty scrapes of Ray's 15 s, so that a quiet replica still has some drafts."""
DRIFT_FRAC = 0.9
"""Of its own day's acceptance length, below which a replica drifts: vLLM issue 41838 saw 4.47 fall to 3.49 in 12 hours."""
FLAT_FRAC = 0.97
"""Of the first position's acceptance at the last one, above which acceptance is too good: aiter issue 2720 had some 99 % at each position, and wrong answers."""

BY = "(model_name, ReplicaId)"
_DRAFTS = f"sum by {BY} (rate(ray_vllm_spec_decode_num_drafts_total[{RATE}]))"
_ACCEPTED = f"sum by {BY} (rate(ray_vllm_spec_decode_num_accepted_tokens_total[{RATE}]))"
_AT_POSITION = f"sum by (model_name, ReplicaId, position) (rate(ray_vllm_spec_decode_num_accepted_tokens_per_pos_total[{RATE}]))"
RECORDS = {
    "raysd:drafts:rate": _DRAFTS,
    "raysd:acceptance_length": f"1 + {_ACCEPTED} / ({_DRAFTS} > 0)",
    "raysd:position_accepted_frac": f"{_AT_POSITION} / on {BY} group_left () ({_DRAFTS} > 0)",
}
"""Recorded under these names, by replica."""


def rules(floor: float, floor_minutes: float) -> dict[str, Any]:
    """Prometheus' rules file. floor: acceptance length below which a replica is reported when it was there for so many minutes (`serve.acceptance_floor`)."""
    alerts = [
        _alert("RaysdAcceptanceBelowFloor", f"raysd:acceptance_length < {floor:g}", f"{60 * floor_minutes:.0f}s", "warning",
               f"{{{{ $labels.ReplicaId }}}} accepts {{{{ printf \"%.2f\" $value }}}} tokens a step, below the floor of {floor:g}",
               "Speculation costs more than it gives here. Did the traffic change? Train the draft on it, serve another k, or recycle the replica (serve.recycle)."),
        _alert("RaysdAcceptanceDrift", f"raysd:acceptance_length < {DRIFT_FRAC:g} * avg_over_time(raysd:acceptance_length[1d])", "30m", "warning",
               "{{ $labels.ReplicaId }} accepts {{ printf \"%.2f\" $value }} tokens a step, a tenth less than over the last day",
               "If other replicas do not, it is this replica's state and not the traffic (vLLM issue 41838): restart it, and consider serve.prefix_caching: false."),
        _alert("RaysdAcceptanceTooFlat",
               f"min by {BY} (raysd:position_accepted_frac) > {FLAT_FRAC:g} * max by {BY} (raysd:position_accepted_frac) and on {BY} count by {BY} (raysd:position_accepted_frac) > 2 "
               f"and on {BY} max by {BY} (raysd:position_accepted_frac) > 0.5",
               "15m", "critical", "{{ $labels.ReplicaId }} accepts as many tokens at its last position as at the first",
               "No draft is so good: verification may be wrong, and with it the answers (aiter issue 2720: k + 1 not a power of two). Compare answers with those of the arm none."),
        _alert("RaysdRequestsWait", "sum by (model_name) (ray_vllm_num_requests_waiting) > 0", "10m", "warning",
               "{{ $value }} requests to {{ $labels.model_name }} wait for a place in an engine", "Are replicas at serve.autoscaling.max_replicas, or nodes missing? Else lower target_ongoing_requests."),
        _alert("RaysdReplicasMissing",
               "sum by (application, deployment) (ray_serve_deployment_replica_healthy) < sum by (application, deployment) (ray_serve_autoscaling_target_replicas)", "30m", "critical",
               "{{ $labels.application }} has {{ $value }} healthy replicas, fewer than it is to have", "Look at `serve status` and at the logs of its replicas; is a node with free GPUs there?"),
        _alert("RaysdEnginePreempts", f"sum by {BY} (rate(ray_vllm_num_preemptions_total[{RATE}])) > 0", "15m", "warning",
               "{{ $labels.ReplicaId }} throws requests out of its KV cache, and computes them again", "Lower serve.autoscaling.max_ongoing_requests, or give engines more memory."),
    ]
    return {"groups": [{"name": "raysd-acceptance", "interval": "30s", "rules": [{"record": name, "expr": expression} for name, expression in RECORDS.items()]},
                       {"name": "raysd-alerts", "rules": alerts}]}


def _alert(name: str, expression: str, after: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {"alert": name, "expr": expression, "for": after, "labels": {"severity": severity}, "annotations": {"summary": summary, "description": description}}


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard; its data source and the model are chosen on it. The rules are to be loaded, too."""
    model = '{model_name=~"$model"}'

    def of_histogram(name: str, share: float) -> str:
        return f"histogram_quantile({share:g}, sum by (le) (rate(ray_vllm_{name}_bucket{model}[{RATE}])))"

    rows = [
        ("Speculation", [
            _panel("Acceptance length", "Tokens emitted per verify step, the bonus token counted; 1 is a draft without any use", "short", {
                "{{ReplicaId}}": f"raysd:acceptance_length{model}", "all": f"1 + sum(rate(ray_vllm_spec_decode_num_accepted_tokens_total{model}[{RATE}])) / (sum(rate(ray_vllm_spec_decode_num_drafts_total{model}[{RATE}])) > 0)"}, least=1),
            _panel("Acceptance by position", "Of all drafts, how many had their first, second, ... token accepted", "percentunit", {
                "{{position}}": f"sum by (position) (rate(ray_vllm_spec_decode_num_accepted_tokens_per_pos_total{model}[{RATE}])) / on () group_left () (sum(rate(ray_vllm_spec_decode_num_drafts_total{model}[{RATE}])) > 0)"}, least=0, most=1),
            _panel("Drafts a second", "Verify steps that had a draft", "ops", {"{{ReplicaId}}": f"raysd:drafts:rate{model}"}, least=0),
            _panel("Drift of acceptance", f"Acceptance length now, as a share of the last day's; an alert below {DRIFT_FRAC:g}", "percentunit", {
                "{{ReplicaId}}": f"raysd:acceptance_length{model} / avg_over_time(raysd:acceptance_length{model}[1d])"}, least=0),
        ]),
        ("Load and replicas", [
            _panel("Ongoing requests a replica, against the target", "What the autoscaler compares", "short", {
                "ongoing, {{deployment}}": "sum by (application, deployment) (ray_serve_autoscaling_total_requests) / (sum by (application, deployment) (ray_serve_deployment_replica_healthy) > 0)",
                "target, {{deployment}}": "max by (application, deployment) (ray_serve_autoscaling_target_ongoing_requests)"}, least=0),
            _panel("Replicas", "Healthy, and as many as there are to be", "short", {
                "healthy, {{deployment}}": "sum by (application, deployment) (ray_serve_deployment_replica_healthy)",
                "target, {{deployment}}": "max by (application, deployment) (ray_serve_autoscaling_target_replicas)",
                "asked for, {{deployment}}": "max by (application, deployment) (ray_serve_autoscaling_desired_replicas)"}, least=0),
            _panel("Requests in engines", "Running: decoded together. Waiting: for a place", "short", {
                "running, {{ReplicaId}}": f"sum by (ReplicaId) (ray_vllm_num_requests_running{model})", "waiting, {{ReplicaId}}": f"sum by (ReplicaId) (ray_vllm_num_requests_waiting{model})"}, least=0),
            _panel("KV cache in use", "Preemptions follow when it is full", "percentunit", {"{{ReplicaId}}": f"max by (ReplicaId) (ray_vllm_kv_cache_usage_perc{model})"}, least=0, most=1),
        ]),
        ("What clients see", [
            _panel("Output tokens a second", "Of all replicas, and by each", "short", {
                "all": f"sum(rate(ray_vllm_generation_tokens_total{model}[{RATE}]))", "{{ReplicaId}}": f"sum by (ReplicaId) (rate(ray_vllm_generation_tokens_total{model}[{RATE}]))"}, least=0),
            _panel("TTFT", "Time to the first token, in the engine", "s", {"p50": of_histogram("time_to_first_token_seconds", 0.5), "p99": of_histogram("time_to_first_token_seconds", 0.99)}, least=0),
            _panel("TPOT", "Time per output token after the first", "s", {
                "p50": of_histogram("request_time_per_output_token_seconds", 0.5), "p99": of_histogram("request_time_per_output_token_seconds", 0.99)}, least=0),
            _panel("Ended requests", "By how they ended", "reqps", {"{{finished_reason}}": f"sum by (finished_reason) (rate(ray_vllm_request_success_total{model}[{RATE}]))"}, least=0),
        ]),
    ]
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        panels += [panel | {"gridPos": {"x": 12 * (place % 2), "y": top + 1 + 8 * (place // 2), "w": 12, "h": 8}} for place, panel in enumerate(row)]
        top += 1 + 8 * ((len(row) + 1) // 2)
    return {"uid": "raysd-speculation", "title": "raysd: served drafts", "tags": ["raysd"], "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"}, "timezone": "browser",
            "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                                    {"name": "model", "label": "Model", "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"}, "includeAll": True, "multi": True, "refresh": 2,
                                     "current": {"text": "All", "value": "$__all"}, "allValue": ".*",
                                     "query": {"query": "label_values(ray_vllm_num_requests_running, model_name)", "refId": "model"}}]},
            "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)]}


def _panel(title: str, text: str, unit: str, expressions: dict[str, str], least: float | None = None, most: float | None = None) -> dict[str, Any]:
    limits = ({} if least is None else {"min": least}) | ({} if most is None else {"max": most})
    return {"type": "timeseries", "title": title, "description": text, "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never"}, **limits}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
            "targets": [{"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend} for number, (legend, expression) in enumerate(expressions.items())]}


def write_observability(folder: Path, floor: float, floor_minutes: float) -> None:
    """Writes rules.yaml and dashboard.json into a folder that is there."""
    import yaml

    (folder / "rules.yaml").write_text(yaml.safe_dump(rules(floor, floor_minutes), sort_keys=False, width=160), encoding="utf-8")
    (folder / "dashboard.json").write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_observability(Path(sys.argv[1]), floor=1.3, floor_minutes=30)
