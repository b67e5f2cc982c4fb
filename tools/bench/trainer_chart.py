"""Chart of trainers: `python -m tools.bench.trainer_chart FILE... --out PNG`. Rates of a step, and a GPU's memory.

FILE: trainer_step_gpu.json or trainer_peers_gpu.json. A row is one setting of a side: the median rate over its runs, and the most memory by
the driver. Later files add only settings that earlier ones lack.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasuki.planner.node import GB
from tools.bench.trainer_peers_gpu import OURS

_COLOURS = {OURS: "#1b6ca8", "torchtitan": "#d98c1f", "trl": "#7f8c8d"}
_NAMES = {"trl": "TRL"}


class Point(NamedTuple):
    side: str
    setting: str
    tokens_per_s: float
    gb: float


def points_of(files: Iterable[Iterable[Mapping[str, Any]]]) -> list[Point]:
    """Points of results without an error, in the order of their first run."""
    points: dict[tuple[str, str], Point] = {}
    for results in files:
        runs: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for result in results:
            if "error" not in result:
                runs[result.get("side", OURS), _setting(result)].append(result)
        for key, found in runs.items():
            rate = statistics.median(run["tokens_per_s"] for run in found)
            points.setdefault(key, Point(*key, rate, max(run["driver_bytes"] for run in found) / GB))
    return list(points.values())


def _setting(result: Mapping[str, Any]) -> str:
    """The case of our side, the flags of another, without what most have in common."""
    if "case" in result:
        return result["case"] if result["compile"] == "none" else f"{result['case']} {result['compile']}"
    return result["settings"].removesuffix(" none").replace("--", "")


def draw(points: Sequence[Point], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 0.45 * len(points)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{_NAMES.get(point.side, point.side)}: {point.setting}" for point in points]
    colours = [_COLOURS[point.side] for point in points]
    for panel, title, values in (
        (left, "real tokens a second and GPU", [point.tokens_per_s for point in points]),
        (right, "memory of a GPU, GB", [point.gb for point in points]),
    ):
        bars = panel.barh(names, values, color=colours, height=0.6)
        panel.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, fontsize=8)
        panel.set_xlim(0, 1.15 * max(values))
        panel.set_title(title, fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    left.invert_yaxis()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    arguments = parser.parse_args()
    draw(points_of(json.loads(file.read_text()) for file in arguments.files), arguments.out)


if __name__ == "__main__":
    main()
