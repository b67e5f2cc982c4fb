"""Sleeping does not change training. Two FSDP2 ranks on a CPU, with shards of unequal size."""

import json
from typing import Any

import pytest

from tests.integration.launched import run_ranks
from tests.integration.trainer_sleep import NUM_STEPS, PUBLISHING
from tests.models import make_model, save_checkpoint


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of each rank."""
    folder = tmp_path_factory.mktemp("sleep")
    save_checkpoint(make_model("qwen2_tied", seed=3), folder / "model")
    run_ranks("trainer_sleep.py", folder, folder / "model", num_ranks=2)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_sleep_in_every_step_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["losses"]["awake"]) == NUM_STEPS
        assert rank["losses"]["sleeper"] == rank["losses"]["awake"]
        assert rank["losses"]["awake"][0] != rank["losses"]["awake"][-1]
        assert [rank[f"is_{what}_equal"] for what in ("log_prob", "value", "reference")] == [True, True, True]
        assert rank["is_equal"]


def test_addresses_are_kept_over_sleeps_and_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert [rank["is_address_kept"] for rank in ranks] == [True, True]


def test_one_rank_without_room_leaves_all_asleep_and_says_how_much_is_missing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metadata = rank["no_room"]["metadata"]
        assert (metadata["rank"], rank["no_room"]["mapped"]) == ("1", 0)
        assert int(metadata["needed_bytes"]) > int(metadata["free_bytes"]) >= 0


def test_sleeps_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after = rank["resources"]
        # Python's own heap may have grown by a mapping; one leaked per sleep would be 30 or more.
        assert abs(after.pop("mappings") - before.pop("mappings")) < 10
        assert after == before


@pytest.mark.parametrize("how", list(PUBLISHING))
def test_what_is_published_is_the_policy_in_every_round_whatever_it_lies_in(ranks: list[dict[str, Any]], how: str) -> None:
    assert [rank["published"][how]["is_equal"] for rank in ranks] == [[True, True, True]] * 2


def test_a_rehearsal_leaves_memory_only_where_copies_stay(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rehearsed = {how: sum(rank["published"][how]["rehearsed"]) for how in PUBLISHING}
        assert rehearsed["copy_leaves"] == 0 < rehearsed["copy_stays"]


def test_published_parameters_keep_their_chunks_or_leave_as_others_do(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kept = {how: [tags["weights"] for tags in rank["published"][how]["tags"]] for how in PUBLISHING}
        for how in ("parameters_stay", "bfloat16_parameters_stay"):
            assert all(mapped == 0 and kept_bytes > 0 for mapped, kept_bytes in kept[how])
        for how in ("parameters_leave", "copy_stays", "copy_leaves"):
            assert kept[how] == [[0, 0]] * 3
