"""Enums of the wire, whose members are not the numbers in messages."""

import pytest

from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.stages import Phase


def test_a_number_of_a_message_is_never_silently_another_phase() -> None:
    state = NodeState(phase=PHASE_TRAIN)
    for compare in (lambda: state.phase == Phase.TRAIN, lambda: state.phase != Phase.TRAIN):
        with pytest.raises(TypeError, match=r"compare Phase\.of\(1\) with Phase\.TRAIN"):
            compare()
    assert Phase.of(state.phase) == Phase.TRAIN == "TRAIN"
    assert {Phase.TRAIN: "held"}["TRAIN"] == "held"
