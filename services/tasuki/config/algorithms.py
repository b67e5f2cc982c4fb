"""`train.algorithm`: presets for settings. Explicit settings in the file take precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tasuki.algorithms.loss_types import COMMON

Algorithm = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo", "dapo", "gspo", "cispo"]
DEFAULT_MAX_NEW_TOKENS = 512
LOSS_KEYS = tuple(name for name in COMMON if name not in ("old_policy", "denominator"))
"""Keys of every loss. `old_policy` is a key of [train]; `denominator` is for loops that accumulate several calls."""
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv:2402.03300, with the now common token mean.
    "grpo": {"advantages": {"estimator": "group_mean", "std": "sample"}, "loss": {"name": "ppo"}},
    # arXiv:2503.20783
    "dr_grpo": {"advantages": {"estimator": "group_mean", "std": "none"}, "loss": {"name": "ppo", "aggregation": "constant"}},
    # arXiv:2402.14740
    "rloo": {"advantages": {"estimator": "leave_one_out"}, "loss": {"name": "ppo"}},
    # arXiv:2501.03262
    "reinforce_pp": {"advantages": {"estimator": "globally_whitened"}, "loss": {"name": "ppo"}},
    "reinforce_pp_baseline": {"advantages": {"estimator": "group_baseline_whitened"}, "loss": {"name": "ppo"}},
    # arXiv:2310.10505
    "remax": {"advantages": {"estimator": "greedy_baseline"}, "loss": {"name": "policy_gradient"}},
    # arXiv:1707.06347, with a critic
    "ppo": {"advantages": {"estimator": "gae"}, "loss": {"name": "ppo"}, "value_loss": {"clip": 0.2}},
    # arXiv:2503.14476
    "dapo": {
        "advantages": {"estimator": "group_mean", "std": "sample"},
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "max_batches": 4,
    },
    # arXiv:2507.18071
    "gspo": {
        "advantages": {"estimator": "group_mean", "std": "sample"},
        "loss": {"name": "gspo", "aggregation": "sequence_mean_token_mean"},
    },
    # arXiv:2506.13585
    "cispo": {"advantages": {"estimator": "group_mean", "std": "sample"}, "loss": {"name": "cispo"}},
}


def expanded(train: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the algorithm's preset under a [train] table, except for settings that another loss or estimator lacks."""
    preset = dict(PRESETS.get(str(train.get("algorithm", "grpo")), {}))
    own, usual = train.get("loss"), preset.get("loss", {})
    if isinstance(own, Mapping) and own.get("name", usual.get("name")) != usual.get("name"):
        preset["loss"] = {key: value for key, value in usual.items() if key in LOSS_KEYS}
    merged = _merged(_with_effect(preset, train), train)
    loss = merged.get("loss")
    if isinstance(loss, Mapping) and loss.get("aggregation") == "constant":
        # Dr. GRPO's constant: the maximum completion length.
        merged["loss"] = {"aggregation_length": merged.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS), **loss}
    return merged


def _with_effect(preset: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """The preset without settings that apply only to its own estimator."""
    own, usual = train.get("advantages"), preset.get("advantages", {})
    estimator = own.get("estimator", usual.get("estimator")) if isinstance(own, Mapping) else usual.get("estimator")
    if estimator == usual.get("estimator"):
        return dict(preset)
    kept = {key: value for key, value in usual.items() if key != "std" or estimator in ("group_mean", "batch_baseline")}
    return {**{key: value for key, value in preset.items() if key != "value_loss" or estimator == "gae"}, "advantages": kept}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged
