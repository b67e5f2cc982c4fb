"""What sleeping does to training: nothing. Two FSDP2 ranks on a CPU, with shards of unequal size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer_sleep import NUM_STEPS
from tests.models import make_model, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("sleep")
    save_checkpoint(make_model("qwen2_tied", seed=3), folder / "model")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join(str(ROOT / part) for part in ("protos", "services", "client", "."))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "integration" / "trainer_sleep.py")
    done = subprocess.run(
        [*launch, script, str(folder), str(folder / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_sleep_in_every_step_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["losses"]["awake"]) == NUM_STEPS
        assert rank["losses"]["sleeper"] == rank["losses"]["awake"]
        assert rank["losses"]["awake"][0] != rank["losses"]["awake"][-1]
        assert (rank["is_equal"], rank["is_log_prob_equal"], rank["is_reference_equal"]) == (True, True, True)


def test_addresses_are_kept_over_sleeps_and_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert [rank["is_address_kept"] for rank in ranks] == [True, True]


def test_one_rank_without_room_leaves_all_asleep_and_says_how_much_is_missing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metadata = rank["no_room"]["metadata"]
        assert (metadata["rank"], rank["no_room"]["mapped"]) == ("1", 0)
        assert int(metadata["needed_bytes"]) > int(metadata["free_bytes"]) >= 0


def test_300_sleeps_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after = rank["resources"]
        assert after == before
