"""Reports of the benchmarks, also of those without a GPU, and their refusals of unusable files and numbers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import changeover_chart, changeover_peers, sync_report, trainer_chart, trainer_peers_gpu

ROUND = {"total_ms": 5.0, "cpu_ms": 9.0, "num_rpcs": 1, "num_handles": 0, "host_ms": 0.0}
CASE = {
    "model": "7b",
    "num_ranks": 1,
    "tp_size": 1,
    "num_engines": 1,
    "publish_ms": 4.0,
    "copied_bytes": 15_000_000_000,
    "floors": {"within": [{"gb_s": 4000.0}]},
    "floor_ms": 4.0,
    "ways": {"tasuki": {"first": ROUND, "rounds": [ROUND, ROUND], "extra_bytes": 0}},
}
RESULT = {"gpu": "NVIDIA H200", "cases": [CASE]}


def _refused(monkeypatch: pytest.MonkeyPatch, main: Callable[[], object], *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def _changed(change: Callable[[Any], object]) -> str:
    result = deepcopy(RESULT)
    change(result)
    return json.dumps(result)


def test_a_report_is_made_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        file.write_text(json.dumps(RESULT))
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, files), "--out", str(tmp_path / "out")])
    sync_report.main()
    assert json.loads((tmp_path / "out/sync_peers.json").read_text()) == {"gpu": "NVIDIA H200", "cases": [CASE, CASE]}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"sync_peers.json", "sync_peers.md", "sync_peers.png"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("rubbish", "Invalid JSON"),
        ("", "Invalid JSON"),
        ("\0\udcff\udcfe", "Invalid JSON"),
        ("[]", "object"),
        (json.dumps([CASE]), "object"),
        ("{}", "gpu: Field required"),
        (_changed(lambda result: result["cases"].clear()), "cases: List should have at least 1 item"),
        (_changed(lambda result: result["cases"][0].pop("ways")), "cases.0.ways: Field required"),
        (_changed(lambda result: result["cases"][0]["ways"].clear()), "ways without tasuki"),
        (_changed(lambda result: result["cases"][0]["ways"]["tasuki"]["rounds"].clear()), "tasuki.rounds: List should have"),
        (
            _changed(lambda result: result["cases"][0]["ways"]["tasuki"]["first"].pop("host_ms")),
            "cases.0.ways.tasuki.first.host_ms: Field required",
        ),
        (_changed(lambda result: result["cases"][0]["ways"]["tasuki"]["first"].update(total_ms=0)), "not more than host_ms"),
        (_changed(lambda result: result["cases"][0].update(floor_ms=float("nan"))), "cases.0.floor_ms"),
    ],
)
def test_a_file_that_is_no_result_is_named_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str, reason: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    _refused(monkeypatch, sync_report.main, file, "--out", tmp_path / "out")
    *_, line = capsys.readouterr().err.splitlines()
    assert f"{file} is not a sync_peers.json of sync_peers: " in line and reason in line
    assert not (tmp_path / "out").exists()


def test_a_report_goes_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(RESULT))
    _refused(monkeypatch, sync_report.main, file, "--out", file)
    assert f"--out {file} cannot be a folder: File exists" in capsys.readouterr().err
    _refused(monkeypatch, sync_report.main, tmp_path, "--out", tmp_path / "out")
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err
    assert json.loads(file.read_text()) == RESULT and list(tmp_path.iterdir()) == [file]


def test_a_report_is_of_one_kind_of_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    files[0].write_text(json.dumps(RESULT))
    files[1].write_text(_changed(lambda result: result.update(gpu="NVIDIA H100")))
    _refused(monkeypatch, sync_report.main, *files, "--out", tmp_path / "out")
    assert "NVIDIA H100 and NVIDIA H200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [
        ("export_memory_gpu", ["--case", "copy stays"]),
        ("sglang_memory_gpu", ["--turn", "tasuki"]),
        ("memory_gpu", ["--part", "pinned rate"]),
        ("trainer_memory_gpu", ["--part", "model", "--model", "model"]),
        ("plan_node_gpu", []),
        ("plan_gpu", ["--part", "qwen2.5-0.5b", "--folder", "model"]),
    ],
)
def test_no_part_of_a_bench_begins_without_its_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: str, arguments: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    _refused(monkeypatch, importlib.import_module(f"tests.bench.{bench}").main, *arguments)
    assert capsys.readouterr().err == "bench: needs 1 GPU, and CUDA shows 0 here\n"


@pytest.mark.parametrize(
    ("bench", "arguments", "reason"),
    [
        ("memory_cpu", ["--gib", "0"], "--gib 0: here it is from 1/1024"),
        ("memory_cpu", ["--gib", "-1"], "--gib -1: here it is from 1/1024"),
        ("memory_cpu", ["--gib", "nan"], "--gib nan: here it is from 1/1024"),
        ("memory_cpu", ["--gib", "1e9"], "--gib 1e+09: here it is from 1/1024"),
        ("step_time", ["/nonexistent"], "/nonexistent is not the folder of a training run"),
        ("plan_node_gpu", ["--gpus", "0"], "'0' is not a number from 1"),
        ("plan_gpu", ["--ranks", "0"], "'0' is not a number from 1"),
        ("trainer_memory_gpu", ["--part", "model"], "--part needs --model"),
        ("trainer_peers_gpu", ["--samples", "24"], "--samples 24: here it is a multiple of 16"),
    ],
)
def test_a_number_or_folder_of_no_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: str, arguments: list[str], reason: str
) -> None:
    _refused(monkeypatch, importlib.import_module(f"tests.bench.{bench}").main, *arguments)
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("metrics", ["", "rubbish", "[]\n[]\n", '{"seconds": {"optim_step": 1}}\n' * 2])
def test_a_run_without_steps_has_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], metrics: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics)
    _refused(monkeypatch, importlib.import_module("tests.bench.step_time").main, tmp_path)
    assert f"{tmp_path} is not the folder of a training run" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [
        (1000, ["tasuki 1", "b 1", "c 1", "tasuki 2", "b 2", "tasuki 3", "tasuki 2 turn", "b 1 turn"]),
        (195, ["tasuki 1", "b 1", "c 1", "tasuki 2", "b 2", "tasuki 2 turn", "b 1 turn"]),
        (185, ["tasuki 1", "b 1", "c 1", "tasuki 2", "tasuki 2 turn", "b 1 turn"]),
        (135, ["tasuki 1", "b 1", "c 1", "tasuki 2", "tasuki 2 turn"]),
        (40, ["tasuki 1", "b 1"]),
    ],
)
def test_tries_end_in_time_for_the_turns_of_the_fastest(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, expected: list[str]
) -> None:
    rates = {"tasuki 1": 100, "tasuki 2": 110, "tasuki 3": 90, "b 1": 50, "b 2": 40}
    now, kept = [0.0], list[int]()
    monkeypatch.setattr(trainer_peers_gpu.time, "monotonic", lambda: now[0])

    def run(side: str, settings: str) -> dict[str, Any]:
        now[0] += 10.0 if side == "c" else 30.0
        name = f"{side} {settings}"
        return {"tokens_per_s": rates[name]} if name in rates else {"error": "out of memory"}

    tries = {"tasuki": ("1", "2", "3"), "b": ("1", "2"), "c": ("1",)}
    results = trainer_peers_gpu.measure(tries, run, lambda each: kept.append(len(each)), turns=1, deadline=limit_s)
    ran = [f"{each['side']} {each['settings']}{' turn' * each['is_turn']}" for each in results]
    assert ran == expected and kept == list(range(1, len(ran) + 1))


def test_the_table_has_the_rates_and_peaks_of_every_side() -> None:
    def result(side: str, rate: int, peak: int, *, is_turn: bool = False) -> dict[str, Any]:
        facts = {"side": side, "settings": f"{peak}", "is_turn": is_turn, "run_s": 1.0, "micro_batch_places": 16_384}
        return facts | {"tokens_per_s": rate, "allocated_bytes": peak * 10**9, "driver_bytes": (peak + 3) * 10**9}

    runs = [result("tasuki", 200, 90), result("trl", 100, 80), result("tasuki", 180, 60)]
    turns = [result("tasuki", 220, 90, is_turn=True), {"side": "trl", "settings": "80", "is_turn": True, "error": "lost"}]
    assert trainer_peers_gpu.table([*runs, *turns]).splitlines() == [
        "tasuki [90]: [200, 220] tokens/s a GPU; peak 90.0 GB, driver 93.0 GB, 16384 places",
        "  least [60]: 180 tokens/s a GPU; peak 60.0 GB, driver 63.0 GB, 16384 places",
        "trl [80]: [100] tokens/s a GPU; peak 80.0 GB, driver 83.0 GB, 16384 places",
        "  least [80]: 100 tokens/s a GPU; peak 80.0 GB, driver 83.0 GB, 16384 places",
        "  tasuki 2.10 times as fast",
    ]


def test_changeovers_of_both_sides_are_in_one_table_and_chart(tmp_path: Path) -> None:
    names = [name for of_side in (*changeover_chart.TO_ROLLOUT, *changeover_chart.TO_TRAINING) for name in of_side]
    names += ["to_rollout_ms", "to_first_token_ms", "to_train_ms"]
    rounds = [dict.fromkeys(names, value) for value in (900.0, 5.0, 7.0, 9.0)]
    figures = changeover_peers.summary(rounds)
    assert figures["send weights"] == {"median": 7.0, "worst": 9.0}  # the first round includes start-up costs
    ours = {"size": "qwen2.5-3b", "gpus": 1, "pooled": {"rounds": rounds, "settled": figures}}
    results = {"size": "qwen2.5-3b", "gpus": 1, "gpu": "NVIDIA H200", "ours": ours, "theirs": {"summary": figures}}
    rows = changeover_peers.table(results).splitlines()
    assert [row.split("  ")[0] for row in rows[1:]] == ["tasuki, pooled", "torch_memory_saver way"]
    changeover_chart.chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_trainers_are_in_one_chart_and_later_files_add_what_is_missing(tmp_path: Path) -> None:
    def step(case: str, rate: int, *, compiled: str = "none") -> dict[str, Any]:
        return {"case": case, "compile": compiled, "tokens_per_s": rate, "driver_bytes": 80 * 10**9}

    def peer(side: str, settings: str, rate: int) -> dict[str, Any]:
        return {"side": side, "settings": settings, "tokens_per_s": rate, "driver_bytes": 90 * 10**9}

    steps = [step("7b", 100), step("7b", 120, compiled="blocks"), {"case": "7b-auto", "compile": "none", "error": "lost"}]
    peers = [peer("tasuki", "7b none", 50), peer("trl", "--liger --batch 2", 10), peer("trl", "--liger --batch 2", 30)]
    points = trainer_chart.points_of([steps, peers])
    assert points == [
        ("tasuki", "7b", 100, 80.0),
        ("tasuki", "7b blocks", 120, 80.0),
        ("trl", "liger batch 2", 20, 90.0),
    ]
    trainer_chart.draw(points, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
