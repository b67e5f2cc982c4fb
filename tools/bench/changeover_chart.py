"""Chart of `changeover_peers`: the stages of a changeover in order, by side and direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.wire.stages import RING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Medians = Mapping[str, float]
THEIR_NAME = "torch_memory_saver,\nbuckets, host copies"
_STAGES = [str(rule.stage) for rule in RING]
TO_ROLLOUT = (_STAGES[:5], ["resume weights", "send weights", "offload", "resume kv_cache"])
TO_TRAINING = (_STAGES[5:], ["release kv_cache", "release weights", "load"])
"""Our stages and their counterparts in other systems, in order."""
_ALIKE = {
    "LOAD_WEIGHTS": "#9467bd", "RESUME_WEIGHTS": "#2ca02c", "SYNC": "#1b6ca8", "OFFLOAD": "#d98c1f", "RESUME_KV": "#c0392b",
    "DRAIN": "#7f8c8d", "PAUSE_KV": "#c0392b", "PAUSE_WEIGHTS": "#2ca02c", "LOAD_TRAINER": "#d98c1f",
    "resume weights": "#2ca02c", "send weights": "#1b6ca8", "offload": "#d98c1f", "resume kv_cache": "#c0392b",
    "release kv_cache": "#c0392b", "release weights": "#2ca02c", "load": "#d98c1f",
}  # fmt: skip
"""Colours; equivalent stages share one."""


def draw(sides: Mapping[str, Medians], *, title: str, file: Path) -> None:
    """sides: medians in milliseconds of each side, by stage and as `to_first_token_ms` and `to_train_ms`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 1.1 * len(sides)), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    _panel(upper, sides, TO_ROLLOUT, total="to_first_token_ms", title="end of a step to the first token")
    _panel(lower, sides, TO_TRAINING, total="to_train_ms", title="last token to the trainer")
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)


def _panel(panel: Axes, sides: Mapping[str, Medians], stages: Sequence[Sequence[str]], *, total: str, title: str) -> None:
    legend: dict[str, Any] = {}
    for side, medians in sides.items():
        left = 0.0
        for name in [name for names in stages for name in names if name in medians]:
            bar = panel.barh(side, medians[name], left=left, color=_ALIKE[name], height=0.6)
            legend.setdefault(name, bar)
            left += medians[name]
        panel.barh(side, max(0.0, medians[total] - left), left=left, color="#e3e5e8", height=0.6)
        panel.annotate(
            f"{medians[total]:.0f} ms", (max(left, medians[total]), side), (6, 0), textcoords="offset points", va="center"
        )
    panel.set_xlim(0, 1.15 * max(medians[total] for medians in sides.values()))
    panel.invert_yaxis()
    panel.legend(legend.values(), legend, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    panel.set_title(title, fontsize=9, loc="left")
    panel.set_title("light: calls and the token itself", fontsize=7, loc="right")
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def medians_of(summary: Mapping[str, Mapping[str, float]]) -> Medians:
    """Returns the median of every figure in a side's summary."""
    return {name: figures["median"] for name, figures in summary.items()}


def chart(results: Mapping[str, Any], file: Path) -> None:
    """results: of changeover_peers.json."""
    nodes = {kv: found for kv, found in results["ours"].items() if isinstance(found, dict)}
    sides = {f"tasuki, {kv}": medians_of(found["settled"]) for kv, found in nodes.items()}
    sides[THEIR_NAME] = medians_of(results["theirs"]["summary"])
    gpus = f"{results['gpus']} {results['gpu']}" + "s" * (results["gpus"] > 1)
    draw(sides, title=f"A changeover of {results['size']} on {gpus}, medians", file=file)
