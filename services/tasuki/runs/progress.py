"""Progress of a training run: one line per step."""

from __future__ import annotations

import sys

from tasuki.client.step import Step

_SHOWN = (
    ("eval/loss", "held-out loss", ".4f"),
    ("log_prob_gap_max", "gap", ".1e"),
    ("explained_variance", "explained", ".2f"),
)
"""Metrics in a step's line: name, label, format."""
INEXACT = (
    "warning: train.top_p or train.top_k filters tokens, but log-probs cover all tokens: importance ratios are biased; "
    "remove both keys to avoid this"
)
"""Printed once per run; the metric inexact_fraction has the amount."""


class TrainProgress:
    """Prints steps as they are reported."""

    def __init__(self) -> None:
        self._has_warned = False

    def report(self, step: Step) -> None:
        if step.metrics.get("inexact_fraction") and not self._has_warned:
            self._has_warned = True
            sys.stderr.write(f"{INEXACT}\n")
        if line := step_line(step):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def step_line(step: Step) -> str:
    """Formats a step as one line, leaving out parts that did not run. Empty if none did: after the last step without a held-out set."""
    parts: list[str] = []
    if step.mean_reward is not None:
        parts.append(f"reward {step.mean_reward:.3f}")
    elif "loss" in step.metrics:
        parts.append(f"loss {step.metrics['loss']:.4f}")
    if step.eval_score is not None:
        parts.append(f"held-out {step.eval_score:.3f}")
    for name, label, form in _SHOWN:
        if name in step.metrics:
            parts.append(f"{label} {step.metrics[name]:{form}}")
    if step.num_failed_rewards:
        parts.append(f"{step.num_failed_rewards} rewards failed")
    if step.num_skipped_updates:
        parts.append(f"{step.num_skipped_updates} updates skipped, gradients not finite")
    if not parts:
        return ""
    return "  ".join([f"step {step.step:>3}", f"version {step.policy_version}", *parts, f"{step.total_seconds():.1f} s"])
