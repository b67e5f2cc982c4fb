"""A plan as a chart: one stacked bar per stage, against the capacity of GPU and host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasuki.cli.plan_report import groups, headline
from tasuki.planner.layout import GB, Part, gb
from tasuki.planner.plan import Plan
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, NotInstalled
from tasuki.wire.extras import install_extras

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

# Trainer in blues, rollout in oranges, memory that varies within a step in greens, the rest in grays.
_COLORS = {
    Part.CONTEXTS: "#8c8c8c",
    Part.MODEL_COPY: "#bdbdbd",
    Part.TRAINER_WEIGHTS: "#08519c",
    Part.GRADIENTS: "#4292c6",
    Part.OPTIMIZER: "#9ecae1",
    Part.EXPORT: "#6a51a3",
    Part.LAYERS: "#00441b",
    Part.WHOLE_GRADIENTS: "#238b45",
    Part.ACTIVATIONS: "#74c476",
    Part.LOGITS: "#c7e9c0",
    Part.TORCH_CACHE: "#d9d9d9",
    Part.ROLLOUT_WEIGHTS: "#a63603",
    Part.KV_CACHE: "#fd8d3c",
    Part.CUDA_GRAPH: "#fdd0a2",
    Part.ENGINE_STEP: "#fee391",
}


_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}


def draw_plan(planned: Plan, file: Path) -> None:
    """Writes `file`. Raises InvalidArgument for a suffix unknown to matplotlib or a file that cannot be written, and NotInstalled
    without matplotlib."""
    try:
        from matplotlib.figure import Figure  # takes half a second to import; no other command draws
    except ImportError as error:
        text = f"drawing needs matplotlib: {install_extras('trainer')}"
        raise NotInstalled(text, packages="matplotlib", extras="trainer") from error
    layout = planned.layout
    kinds = groups(planned) if layout.device == "cuda" else []
    figure = Figure(figsize=(11, 2.2 + 3.4 * len(kinds) + 2.2), layout="constrained")
    panels = figure.subplots(len(kinds) + 1, 1, sharex=True, squeeze=False, height_ratios=[3.0] * len(kinds) + [1.6])[:, 0]
    used: dict[Part, str] = {}
    for axes, (name, index) in zip(panels, kinds, strict=False):
        _bars(axes, [stage.gpus[index] for stage in planned.stages], limit=layout.gpu_bytes, used=used)
        axes.set_ylabel(f"{name}, GB")
    _bars(panels[-1], [stage.host for stage in planned.stages], limit=layout.host_bytes, used=used)
    panels[-1].set_ylabel("host, GB")
    panels[-1].set_xticks(range(len(planned.stages)), [stage.stage.replace("_", "\n") for stage in planned.stages], fontsize=8)
    result = "fits" if planned.fits else "does NOT fit"
    first, second = headline(layout).split("; ")[0].split(": ", 1)
    peak = f"peak {gb(planned.gpu_peak.gpu_bytes)} GB in {planned.gpu_peak.stage}; " if kinds else ""
    engines = headline(layout).split("; ")[1]
    figure.suptitle(f"{first}: {result}\n{peak}{second}\n{engines}", fontsize=10)
    handles = [_patch(color) for color in used.values()]
    figure.legend(handles, list(used), loc="outside right upper", fontsize=8, reverse=True, frameon=False)
    try:
        with named_if_denied(file, key="plot"):
            figure.savefig(file, dpi=120)
    except ValueError as error:
        raise InvalidArgument("plot", f"{file}: {error}") from error
    except OSError as error:
        raise InvalidArgument("plot", f"{file} cannot be written: {error.strerror}") from error


def _bars(axes: Axes, columns: Sequence[Mapping[Part, int]], *, limit: int, used: dict[Part, str]) -> None:
    totals = [sum(parts.values()) for parts in columns]
    below = [0.0] * len(columns)
    for part, color in _COLORS.items():
        heights = [parts.get(part, 0) / GB for parts in columns]
        if any(heights):
            used[part] = color
            axes.bar(range(len(columns)), heights, bottom=below, color=color, width=0.72, edgecolor="white", linewidth=0.4)
            below = [base + height for base, height in zip(below, heights, strict=True)]
    for place, total in enumerate(totals):
        is_over = total > limit
        axes.annotate(
            gb(total),
            (place, total / GB),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="#cb181d" if is_over else "black",
            fontweight="bold" if is_over else "normal",
            bbox=_PAPER,
            zorder=5,
        )
    top = max(totals) / GB
    # A capacity far above the bars would flatten them.
    if limit / GB <= 2 * top:
        axes.axhline(limit / GB, color="#cb181d", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{gb(limit)} GB",
            (0, limit / GB),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color="#cb181d",
        )
        top = max(top, limit / GB)
    axes.set_ylim(0, top * 1.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _patch(color: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(color=color)
