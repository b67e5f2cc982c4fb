"""Stages of the trainer: every pair of them."""

import pytest

from tasuki.trainer.service import state as stages
from tasuki.wire.errors import StageOrder, WrongPhase
from tasuki.wire.stages import START, Stage

PLACES = (None, Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS, Stage.OFFLOAD)
ACCEPTED = {
    (None, Stage.LOAD_WEIGHTS),
    (None, Stage.LOAD_TRAINER),  # restarted in the middle of a changeover
    (Stage.LOAD_TRAINER, Stage.LOAD_WEIGHTS),
    (Stage.LOAD_WEIGHTS, Stage.OFFLOAD),
    (None, Stage.OFFLOAD),  # to make room for an engine that starts
    (Stage.LOAD_TRAINER, Stage.OFFLOAD),
    (Stage.OFFLOAD, Stage.LOAD_TRAINER),
}


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("stage", Stage)
def test_only_the_ring_is_accepted(after: Stage | None, stage: Stage) -> None:
    if (after, stage) in ACCEPTED:
        stages.raise_unless_next(stage, after=after)
        return
    with pytest.raises(StageOrder) as raised:
        stages.raise_unless_next(stage, after=after)
    assert raised.value.metadata["after"] == (after or START)
    assert raised.value.metadata["allowed"] in {next_stage for place, next_stage in ACCEPTED if place == after}


def test_withdrawal_undoes_a_publication_and_is_harmless_before_one() -> None:
    assert stages.stage_after_withdrawal(Stage.LOAD_WEIGHTS) == Stage.LOAD_TRAINER
    assert stages.stage_after_withdrawal(Stage.LOAD_TRAINER) == Stage.LOAD_TRAINER
    assert stages.stage_after_withdrawal(None) is None
    with pytest.raises(StageOrder):
        stages.stage_after_withdrawal(Stage.OFFLOAD)


def test_training_needs_the_loaded_place() -> None:
    for after in (None, Stage.LOAD_TRAINER):
        stages.raise_unless_loaded(after)
    for after in (Stage.LOAD_WEIGHTS, Stage.OFFLOAD):
        with pytest.raises(WrongPhase, match="acquire phase TRAIN"):
            stages.raise_unless_loaded(after)
