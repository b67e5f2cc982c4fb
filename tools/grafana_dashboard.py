"""Prints deploy/grafana/tasuki.json. Usage: python tools/grafana_dashboard.py > deploy/grafana/tasuki.json"""

import json
import sys
from typing import Any

_NODE = 'instance=~"$node"'
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3
# Title, unit, and a query and legend per line. NODE selects the nodes.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Phase", "short", (("tasuki_phase{NODE} == 1", "{{instance}} {{phase}}"),)),
    ("Services that answer", "short", (("tasuki_service_up{NODE}", "{{service}}"),)),
    ("Policy version", "short", (("tasuki_policy_version{NODE}", "{{service}}"),)),
    ("Reward", "short", (("tasuki_run_reward{NODE}", "{{name}}"), ("tasuki_run_eval_score{NODE}", "held-out"))),
    ("Step", "short", (("tasuki_run_step{NODE}", "step"),)),
    ("Seconds of a step", "s", (("tasuki_run_step_seconds{NODE}", "{{part}}"),)),
    ("Log-prob gap", "short", (("tasuki_log_prob_gap{NODE}", "{{stat}}"),)),
    ("Entropy and KL", "short", (('tasuki_run_metric{NODE, name=~"entropy|.*_kl"}', "{{name}}"),)),
    (
        "Staleness of samples (versions)",
        "short",
        (
            (
                "sum(rate(tasuki_sample_staleness_versions_sum{NODE}[$__rate_interval])) "
                "/ sum(rate(tasuki_sample_staleness_versions_count{NODE}[$__rate_interval]))",
                "mean",
            ),
        ),
    ),
    (
        "GPUs by use",
        "short",
        (
            ("sum by (use) (rate(tasuki_gpu_seconds_total{NODE}[$__rate_interval]))", "{{use}}"),
            ("sum(tasuki_gpus{NODE}) - sum(rate(tasuki_gpu_seconds_total{NODE}[$__rate_interval]))", "idle"),
        ),
    ),
    (
        "Seconds of a stage (mean)",
        "s",
        (
            (
                "sum by (stage) (rate(tasuki_stage_seconds_sum{NODE}[$__rate_interval])) "
                "/ sum by (stage) (rate(tasuki_stage_seconds_count{NODE}[$__rate_interval]))",
                "{{stage}}",
            ),
        ),
    ),
    (
        "Changeovers a minute",
        "short",
        (
            (
                "60 * sum by (target, status) (rate(tasuki_changeovers_total{NODE}[$__rate_interval]))",
                "{{target}} {{status}}",
            ),
        ),
    ),
    ("Memory by tag", "bytes", (("sum by (service, tag) (tasuki_memory_mapped_bytes{NODE})", "{{service}} {{tag}}"),)),
    (
        "Tags that stay (ranks)",
        "short",
        (("sum by (service, tag) (tasuki_memory_stays{NODE})", "{{service}} {{tag}}"),),
    ),
    ("Memory as planned", "bytes", (("sum by (service, tag) (tasuki_memory_planned_bytes{NODE})", "{{service}} {{tag}}"),)),
    (
        "Devices",
        "bytes",
        (("tasuki_device_free_bytes{NODE}", "{{device}} free"), ("tasuki_device_total_bytes{NODE}", "{{device}} total")),
    ),
    (
        "Requests",
        "short",
        (("tasuki_rollout_running_requests{NODE}", "running"), ("tasuki_rollout_queued_requests{NODE}", "queued")),
    ),
    (
        "KV cache (tokens)",
        "short",
        (
            ("tasuki_rollout_kv_tokens{NODE}", "used"),
            ("tasuki_rollout_kv_capacity_tokens{NODE}", "capacity"),
        ),
    ),
    (
        "Samples a second",
        "short",
        (
            ("sum by (finish_reason) (rate(tasuki_rollout_samples_total{NODE}[$__rate_interval]))", "{{finish_reason}}"),
            ("sum by (role) (rate(tasuki_trainer_samples_total{NODE}[$__rate_interval]))", "learned by {{role}}"),
        ),
    ),
    (
        "Tokens a second",
        "short",
        (
            ("sum(rate(tasuki_rollout_tokens_total{NODE}[$__rate_interval]))", "generated"),
            ("sum by (role) (rate(tasuki_trainer_tokens_total{NODE}[$__rate_interval]))", "learned by {{role}}"),
        ),
    ),
    (
        "Optimizer steps a minute",
        "short",
        (("60 * sum by (role, status) (rate(tasuki_trainer_steps_total{NODE}[$__rate_interval]))", "{{role}} {{status}}"),),
    ),
    (
        "Failed calls a second",
        "short",
        (
            (
                'sum by (grpc_method, grpc_code) (rate(grpc_server_handled_total{NODE, grpc_code!="OK"}[$__rate_interval]))',
                "{{grpc_method}} {{grpc_code}}",
            ),
        ),
    ),
    ("Spans a second", "short", (("sum by (outcome) (rate(tasuki_spans_total{NODE}[$__rate_interval]))", "{{outcome}}"),)),
)


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "tasuki",
        "uid": "tasuki",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "node",
                    "label": "Node",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(tasuki_phase, instance)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, *panel, source=source) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, lines: tuple[tuple[str, str], ...], *, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.replace("NODE", _NODE), "legendFormat": legend}
            for index, (query, legend) in enumerate(lines)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
