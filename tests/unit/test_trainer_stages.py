"""The trainer's part of the ring: every pair of stages."""

from __future__ import annotations

import pytest

from tasuki.trainer import stages
from tasuki.v1.types_pb2 import STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS, STAGE_OFFLOAD, STAGE_UNSPECIFIED, Stage
from tasuki.wire.errors import StageOrder, WrongPhase

PLACES = (STAGE_UNSPECIFIED, STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS, STAGE_OFFLOAD)
ACCEPTED = {
    (STAGE_UNSPECIFIED, STAGE_LOAD_WEIGHTS),
    (STAGE_UNSPECIFIED, STAGE_LOAD_TRAINER),  # started anew in the middle of a changeover
    (STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS),
    (STAGE_LOAD_WEIGHTS, STAGE_OFFLOAD),
    (STAGE_UNSPECIFIED, STAGE_OFFLOAD),  # to make room for an engine that starts
    (STAGE_LOAD_TRAINER, STAGE_OFFLOAD),
    (STAGE_OFFLOAD, STAGE_LOAD_TRAINER),
}


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("stage", [*Stage.values(), 99])
def test_only_the_ring_is_accepted(after: Stage, stage: Stage) -> None:
    if (after, stage) in ACCEPTED:
        stages.raise_unless_next(stage, after=after)
        return
    with pytest.raises(StageOrder) as raised:
        stages.raise_unless_next(stage, after=after)
    assert raised.value.metadata["after"] == Stage.Name(after)
    assert raised.value.metadata["allowed"] in {Stage.Name(next_stage) for place, next_stage in ACCEPTED if place == after}


def test_withdrawal_undoes_a_publication_and_is_harmless_before_one() -> None:
    assert stages.stage_after_withdrawal(STAGE_LOAD_WEIGHTS) == STAGE_LOAD_TRAINER
    assert stages.stage_after_withdrawal(STAGE_LOAD_TRAINER) == STAGE_LOAD_TRAINER
    assert stages.stage_after_withdrawal(STAGE_UNSPECIFIED) == STAGE_UNSPECIFIED
    with pytest.raises(StageOrder):
        stages.stage_after_withdrawal(STAGE_OFFLOAD)


def test_training_needs_the_loaded_place() -> None:
    for after in (STAGE_UNSPECIFIED, STAGE_LOAD_TRAINER):
        stages.raise_unless_loaded(after)
    for after in (STAGE_LOAD_WEIGHTS, STAGE_OFFLOAD):
        with pytest.raises(WrongPhase, match="acquire phase TRAIN"):
            stages.raise_unless_loaded(after)
