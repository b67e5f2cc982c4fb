"""Summary and curve of a supervised run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasuki.client.step import Step
from tasuki.runs.folder import draw_points


def summarize_sft(
    steps: Sequence[Step], *, seed: int, seconds: float, changeovers: int, policy_version: int
) -> dict[str, object]:
    """Losses are in nats per token; None if not measured."""
    held_out, losses, num_tokens = (_known(steps, name) for name in ("eval/loss", "loss", "num_tokens"))
    return {
        "eval_loss_before": held_out[0] if held_out else None,
        "eval_loss_after": held_out[-1] if held_out else None,
        "loss_last": losses[-1] if losses else None,
        "seconds": round(seconds, 1),
        "steps": sum(not step.is_evaluation for step in steps),
        "num_tokens": int(sum(num_tokens)),
        "changeovers": changeovers,
        "seed": seed,
        "policy_version": policy_version,
    }


def draw_sft_curve(output_dir: Path, steps: Sequence[Step]) -> None:
    """Draws curve.png by step: losses above, gradient norm below."""
    from matplotlib.figure import Figure  # takes half a second to import; no other command draws

    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for name, label, color, marker in (("loss", "batch", "tab:blue", ""), ("eval/loss", "held-out", "tab:orange", "o")):
        draw_points(loss, [(step.step, step.metrics.get(name)) for step in steps], label=label, color=color, marker=marker)
    draw_points(norm, [(step.step, step.grad_norm) for step in steps], label="before clipping", color="tab:gray")
    loss.set_ylabel("loss")
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("step")
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="upper right")
    figure.savefig(output_dir / "curve.png", dpi=120)


def _known(steps: Sequence[Step], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]
