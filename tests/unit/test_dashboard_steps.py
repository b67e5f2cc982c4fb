"""A run's figures by step: damage that a tail of metrics.jsonl survives, and the number of points drawn for a long run."""

import json
import math
import time
from pathlib import Path

from tasuki.dashboard import steps
from tasuki.dashboard.steps import StepColumns, draw
from tests.limits import limit_s

RECORDED = Path(__file__).parents[1] / "recorded_run"


def line(step: int, **figures: object) -> str:
    return json.dumps({"step": step, "seconds": {"generate": 0.5}, **figures}) + "\n"


def read_all(columns: StepColumns) -> StepColumns:
    while columns.advance():
        pass
    return columns


def thinned(*runs: StepColumns, points: int = 100, first: int = 0, last: int = 10**9) -> dict:
    return steps.thinned(runs, first=first, last=last, points=points)


def drawn(found: dict) -> list[dict]:
    return draw(found["series"], found["constants"])


def test_bad_and_half_written_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    bad = [
        b"\xff\xfe\n", b"{}\n", b"[1]\n", b"null\n", b'{"step": "1"}\n', b'{"step": -4}\n', b'{"step": 1e400}\n', b"{" * 20_000 + b"\n",
        b"[" * 200_000 + b"\n", b'{"step": ' + b"9" * 400 + b"}\n", b'{"step": 3, "mean_reward": NaN, "loss": ' + b"9" * 400 + b"}\n",
    ]  # fmt: skip
    file.write_bytes(line(1, mean_reward=0.5).encode() + b"".join(bad) + b'{"step": 4, "mean_rew')
    columns = read_all(StepColumns(tmp_path))
    assert list(columns.steps) == [1, 3]
    with file.open("ab") as lines:
        lines.write(b'ard": 0.75}\n')
    read_all(columns)
    assert thinned(columns)["steps"] == [1, 3, 4]
    assert thinned(columns)["series"]["mean_reward"][0]["mean"] == [0.5, None, 0.75]
    assert columns.last()["mean_reward"] == 0.75


def test_steps_that_a_resumed_run_makes_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step, loss=1.0) for step in range(10)))
    columns = read_all(StepColumns(tmp_path))
    aside = tmp_path / "aside"
    aside.write_text("".join(line(step, loss=2.0, entropy=3.0) for step in range(4, 7)))
    aside.replace(file)
    read_all(columns)
    assert list(columns.steps) == [0, 1, 2, 3, 4, 5, 6]
    assert list(columns.columns["loss"]) == [1.0] * 4 + [2.0] * 3
    assert [math.isnan(value) for value in columns.columns["entropy"]] == [True] * 4 + [False] * 3


def test_a_hundred_thousand_steps_are_a_few_points_that_keep_the_extremes(tmp_path: Path) -> None:
    values = [math.sin(step / 1000) + (step == 54_321) * 50 for step in range(100_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, loss=value) for step, value in enumerate(values)))
    columns = read_all(StepColumns(tmp_path))
    started = time.process_time()
    found = thinned(columns, points=400)
    assert time.process_time() - started < limit_s(1.0)
    loss = found["series"]["loss"][0]
    assert (len(found["steps"]), found["bucket"], found["steps"][-1]) == (400, 250, 99_999)
    assert max(loss["high"]) > 49 and max(loss["mean"]) < 2
    assert loss["mean"][0] == float(f"{sum(values[:250]) / 250:.6g}")
    closer = thinned(columns, points=400, first=54_300, last=54_350)
    assert (closer["bucket"], len(closer["steps"])) == (1, 51)


def test_charts_of_a_recorded_run_have_each_figure_once() -> None:
    columns = read_all(StepColumns(RECORDED))
    charts = drawn(thinned(columns))
    titles = [chart["title"] for chart in charts]
    assert titles[:7] == [
        "Reward, weighted sum", "Held-out reward, weighted sum", "Loss", "Log-prob gap, trainer - rollout", "Entropy",
        "Tokens of a completion", "Seconds of a step by part",
    ]  # fmt: skip
    parts = next(chart for chart in charts if chart["is_stacked"])
    assert [one["name"] for one in parts["series"]][:3] == ["to_rollout", "evaluate", "generate"]
    constants = thinned(columns)["constants"]
    assert (constants["clip_fraction"], constants["rollout_kl"], "log_prob_gap" in constants) == (0.0, None, False)
    num_drawn = sum(len(chart["series"]) for chart in charts)
    assert num_drawn + len(constants) == len(columns.columns) - 4  # counters are shown as numbers


def test_another_run_is_drawn_at_the_same_steps_and_a_reward_that_never_varies_is_still_a_chart(tmp_path: Path) -> None:
    runs = []
    for name, numbers in (("a", range(10, 20)), ("b", range(12, 30, 3))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(line(step, mean_reward=0.0, loss=step / 2) for step in numbers))
        runs.append(read_all(StepColumns(tmp_path / name)))
    found = thinned(*runs)
    assert found["steps"] == [*range(10, 20), 21, 24, 27] and found["bucket"] == 1
    assert found["series"]["loss"][0]["mean"] == [step / 2 if step < 20 else None for step in found["steps"]]
    assert found["series"]["loss"][1]["mean"] == [step / 2 if step % 3 == 0 and step > 11 else None for step in found["steps"]]
    coarse = thinned(*runs, points=5)
    assert coarse["steps"] == [13, 17, 21, 25, 27]
    assert coarse["series"]["loss"][1]["low"] == [6.0, 7.5, 9.0, 12.0, 13.5]
    charts = {chart["title"]: [one["run"] for one in chart["series"]] for chart in drawn(found)}
    assert charts == {"Reward, weighted sum": [0, 1], "Loss": [0, 1]}


def test_steps_that_change_no_weights_are_counted(tmp_path: Path) -> None:
    updates = [1, 0, 1, None, 0, 0, None]  # None: a step that only evaluated
    lines = [
        line(step, eval_score=1.0, num_failed_groups=0)
        if made is None
        else line(step, mean_num_tokens=5.0, num_policy_steps=made, num_failed_groups=step)
        for step, made in enumerate(updates)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    columns = read_all(StepColumns(tmp_path))
    assert columns.without_update() == {"count": 3, "newest": 2, "failed_groups": 5}
    assert thinned(columns)["without_update"] == [0, 1, 0, 0, 1, 1, 0]
