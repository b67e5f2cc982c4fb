"""Table and chart of sync_peers.json: `python -m tools.bench.sync_report FILE... --out FOLDER` merges several runs."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "tasuki"
HEADINGS = ("", "median ms", "of ours", "p99 ms", "first ms", "GB/s", "% of floor", "RPCs", "handles", "CPU s", "extra GPU MiB")
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class Round(BaseModel, strict=True):
    """The fields of a round in sync_peers.json that the report reads; the models below likewise."""

    total_ms: Cost
    cpu_ms: Cost
    num_rpcs: Count
    num_handles: Count
    host_ms: Cost

    @model_validator(mode="after")
    def takes_time_beside_the_host(self) -> "Round":
        if self.total_ms <= self.host_ms:
            raise ValueError("total_ms is not more than host_ms")
        return self


class WayRounds(BaseModel, strict=True):
    first: Round
    rounds: Annotated[list[Round], Field(min_length=1)]
    extra_bytes: Count


class CaseRounds(BaseModel, strict=True):
    model: str
    num_ranks: Count
    tp_size: Count
    num_engines: Count
    publish_ms: Cost
    copied_bytes: Count
    floor_ms: Cost
    ways: dict[str, WayRounds]

    @model_validator(mode="after")
    def has_ours(self) -> "CaseRounds":
        if OURS not in self.ways:
            raise ValueError(f"ways without {OURS}, which the others are compared with")
        return self


class Result(BaseModel, strict=True):
    gpu: str
    cases: Annotated[list[CaseRounds], Field(min_length=1)]


def read_result(file: Path) -> dict[str, Any]:
    """Reads a sync_peers.json. Raises ValueError with a message of one line."""
    try:
        content = file.read_bytes()
        Result.model_validate_json(content)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{file} is not a sync_peers.json of sync_peers: {f'{where}: ' * bool(where)}{first['msg']}"
        ) from error
    result: dict[str, Any] = json.loads(content)
    return result


def write_report(result: dict[str, Any], out: Path) -> str:
    """Writes JSON, table and chart into `out`; returns the table."""
    table = markdown(result)
    (out / "sync_peers.json").write_text(json.dumps(result, indent=1))
    (out / "sync_peers.md").write_text(table)
    draw(result, out / "sync_peers.png")
    return table


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"{result['gpu']}; medians of {_num_rounds(result)} rounds after the first; handles, CPU and memory of one sync",
        "",
    ]
    for case in result["cases"]:
        size, floor = f"{case['copied_bytes'] / 1e9:.1f} GB", f"floor {case['floor_ms']:.2f} ms"
        lines += [f"{title(case)}: {size}, {floor}, published before in {case['publish_ms']:.1f} ms", ""]
        lines += [_line(*HEADINGS), "|---|" + "--:|" * (len(HEADINGS) - 1)]
        for name, way in case["ways"].items():
            lines.append(_line(name, *_times(case, way), *_costs(way)))
            if way["first"]["host_ms"]:
                lines.append(_line("its update alone", *_times(case, way, without="host_ms"), *[""] * len(_costs(way))))
        lines.append("")
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(case: dict[str, Any], way: dict[str, Any], *, without: str | None = None) -> list[str]:
    first, *times = [one["total_ms"] - (one[without] if without else 0.0) for one in [way["first"], *way["rounds"]]]
    median, ours = statistics.median(times), median_ms(case, OURS)
    return [
        f"{median:.1f}",
        f"{median / ours:.2f}",
        f"{p99(times):.1f}",
        f"{first:.0f}",
        f"{case['copied_bytes'] / median / 1e6:.0f}",
        f"{100 * case['floor_ms'] / median:.0f}",
    ]


def _costs(way: dict[str, Any]) -> list[str]:
    last = way["rounds"][-1]
    return [
        str(last["num_rpcs"]),
        str(last["num_handles"]),
        f"{statistics.mean(one['cpu_ms'] for one in way['rounds']) / 1e3:.3f}",
        f"{way['extra_bytes'] / 2**20:.0f}",
    ]


def title(case: dict[str, Any]) -> str:
    num_ranks, gpus = case["num_ranks"], "GPU" if case["num_ranks"] == 1 else "GPUs"
    replicas = f", {case['num_engines']} replicas" if case["num_engines"] > 1 else ""
    return f"{case['model'].upper()}, {num_ranks} {gpus}, TP {case['tp_size']}{replicas}"


def median_ms(case: dict[str, Any], name: str) -> float:
    return statistics.median(one["total_ms"] for one in case["ways"][name]["rounds"])


def p99(values: Sequence[float]) -> float:
    return sorted(values)[-1 - len(values) // 100]


def draw(result: dict[str, Any], file: Path) -> None:
    """Draws medians as bars with a mark at the 99th percentile: one panel per case, the floor as a line, host time as a lighter part."""
    from matplotlib.figure import Figure

    cases = result["cases"]
    figure = Figure(figsize=(9, 0.6 + sum(0.9 + 0.34 * len(case["ways"]) for case in cases)), layout="constrained")
    heights = [1.5 + len(case["ways"]) for case in cases]
    panels = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)
    for case, (panel,) in zip(cases, panels, strict=True):
        _draw_case(panel, case)
    figure.suptitle(f"Weights into running SGLang engines, from the front's call, milliseconds ({result['gpu']})", fontsize=11)
    figure.savefig(file, dpi=150)


def _draw_case(panel: "Axes", case: dict[str, Any]) -> None:
    names = list(case["ways"])
    medians = [median_ms(case, name) for name in names]
    ends = [p99([one["total_ms"] for one in case["ways"][name]["rounds"]]) for name in names]
    panel.barh(names, medians, color=["#1b6ca8" if name == OURS else "#b8bcc2" for name in names], height=0.7)
    on_host = [statistics.median(one["host_ms"] for one in way["rounds"]) for way in case["ways"].values()]
    panel.barh(names, on_host, color="#e3e5e8", height=0.7)
    panel.scatter(ends, names, marker="|", s=60, color="#444444", zorder=3)
    for name, median, end in zip(names, medians, ends, strict=True):
        panel.annotate(f"{median:.1f}", (max(median, end), name), (6, 0), textcoords="offset points", va="center", fontsize=8)
    panel.axvline(case["floor_ms"], color="#c0392b", linewidth=1)
    panel.set_xlim(0, 1.12 * max(*medians, *ends))
    panel.invert_yaxis()
    panel.set_title(title(case), fontsize=9, loc="left")
    panel.set_title(
        f"bar: median, tick: p99, light: copy on the host, red: floor, {case['floor_ms']:.1f}", fontsize=7, loc="right"
    )
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _num_rounds(result: dict[str, Any]) -> int:
    return len(next(iter(result["cases"][0]["ways"].values()))["rounds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        results = [read_result(file) for file in args.files]
    except ValueError as error:
        parser.error(str(error))
    if len(gpus := {result["gpu"] for result in results}) > 1:
        parser.error(f"one report is of one kind of GPU, and the files are of {' and '.join(sorted(gpus))}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be a folder: {error.strerror}")
    print(write_report({"gpu": results[0]["gpu"], "cases": [case for result in results for case in result["cases"]]}, args.out))


if __name__ == "__main__":
    main()
