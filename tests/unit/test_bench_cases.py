"""Benchmark refusals: cases that cannot run, machines without GPUs, and ranks that end early."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

from tests.bench import gpus
from tests.bench.cases import Case
from tests.bench.processes import REPOSITORY
from tests.bench.sync_ranks import Ranks


def test_a_case_is_what_it_says() -> None:
    assert Case.of("7b:4:1x4") == Case("7b", num_ranks=4, tp_size=1, num_engines=4)
    assert Case.of("tiny:1:2").num_gpus == 2
    assert [str(Case.of(text)) for text in ("7b:4:4", "32b:2:4x2")] == ["7b:4:4", "32b:2:4x2"]


@pytest.mark.parametrize(
    "text",
    ["rubbish", "7b:2:2:2", "7b:0:1", "7b:1:0", "7b:4:3", "9000b:1:1", "7b:1:1x0", "7b:1:-1", "7b:1:1x", "7b:1:1x2x2", ""],
)
def test_a_case_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=repr(text)):
        Case.of(text)


@pytest.mark.parametrize("text", ["7b:4:2", "7b:1:1x2", "7b:2:2x2"])
def test_peers_have_a_trainer_rank_beside_every_engine_rank(text: str) -> None:
    assert [Case.beside_each_other(one).num_gpus for one in ("7b:2:2", "7b:4:2x2")] == [2, 4]
    with pytest.raises(ArgumentTypeError, match=repr(text)):
        Case.beside_each_other(text)


@pytest.mark.parametrize("text", ["7b:3:1x3", "tiny:5:1x5", "32b:7:1x7"])
def test_peers_gather_as_many_rows_from_every_trainer_rank(text: str) -> None:
    cases = ["7b:1:1", "7b:4:4", "7b:4:1x4", "32b:4:4", "32b:8:8", "tiny:2:1x2"]
    assert [str(Case.beside_each_other(one)) for one in cases] == cases
    with pytest.raises(ArgumentTypeError, match=f"{text!r}.*cannot be shared out"):
        Case.beside_each_other(text)


def test_missing_gpus_are_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.require_gpus()
    with pytest.raises(SystemExit) as ended:
        gpus.require_gpus(4)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("needs 4 GPUs, and CUDA shows 1 here\n")


def test_a_rank_that_ends_is_named_with_its_exit_code() -> None:
    # The first rank reads until its input ends; the second cannot read its file.
    ranks = Ranks("json.tool", [["--compact"], ["/nonexistent"]])
    with pytest.raises(SystemExit, match=r"json.tool /nonexistent ended with exit code [12]"):
        ranks.ask("rubbish")
    assert all(rank.poll() is not None for rank in ranks._ranks)


def test_ranks_that_wait_for_each_other_at_their_end_are_closed_together(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import pathlib, sys, time\n"
        "for line in sys.stdin: print('{}', flush=True)\n"
        "ours, theirs = map(pathlib.Path, sys.argv[1:])\n"
        "ours.touch()\n"
        "end = time.monotonic() + 20\n"
        "while not theirs.exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(not theirs.exists())\n"
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        ranks = Ranks("waiting", [[first, second], [second, first]])
    assert ranks.ask("now") == [{}, {}]
    ranks.close()
    assert [rank.returncode for rank in ranks._ranks] == [0, 0]


def test_a_bench_refuses_its_command_line_before_it_begins() -> None:
    command = [sys.executable, "-m", "tests.bench.sync_gpu", "--cases", "7b:1:1", "7b:1:1x0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "'7b:1:1x0' is not" in done.stderr
