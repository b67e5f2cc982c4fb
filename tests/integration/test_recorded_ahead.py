"""A plan recorded before the trainer publishes: used by the first sync if parameters and layout are the same, otherwise recorded then."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import pytest
import torch

from tasuki.rollout.rank import EngineRank, rank_allocator
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.record import Layout, RecordingTensor
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.v1.types_pb2 import MEMORY_TAG_WEIGHTS
from tasuki.wire.stages import MemoryTag
from tests.integration.awkward_model import TENSORS, AwkwardModel, Trainer, assert_holds, expected, receive, trainer

__all__ = ["trainer"]

LAYOUT: Layout = {name: (shape, torch.bfloat16) for name, shape in TENSORS.items()}
FALLBACKS = {"transposed", "scale", "doubled"}


class CountingModel(AwkwardModel):
    """Counts the tensors that its loader was shown without values. Skips unknown ones, as SGLang's loaders do."""

    num_recorded = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(self._counted(weights))

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.num_recorded += isinstance(tensor, RecordingTensor)
            if name in TENSORS:
                yield name, tensor


def recorded(layout: Layout = LAYOUT) -> tuple[CountingModel, WeightReceiver, int]:
    """Returns a model whose plan for `layout` was recorded, and the number of tensors that took."""
    model = CountingModel()
    receiver = WeightReceiver(model)
    receiver.record_ahead(layout)
    assert model.num_recorded > 0
    return model, receiver, model.num_recorded


def test_the_first_sync_uses_the_recorded_plan_and_observes_fallbacks(trainer: Trainer) -> None:
    model, receiver, num_recorded = recorded()
    assert set(receive(receiver, trainer.publish(0)).fallback_names) == FALLBACKS
    assert model.num_recorded == num_recorded
    assert_holds(model, expected(trainer))
    assert receiver.plan is not None
    assert {write.parameter for write in receiver.plan.fallback_writes} == FALLBACKS


def test_recording_ahead_makes_the_plan_of_a_first_sync_whatever_the_order_of_names(trainer: Trainer) -> None:
    _, receiver, _ = recorded(dict(reversed(LAYOUT.items())))
    receive(receiver, trainer.publish(0))
    other = WeightReceiver(AwkwardModel())
    receive(other, trainer.handles(0))
    assert receiver.plan == other.plan


@pytest.mark.parametrize(
    "layout",
    [
        {name: (shape, torch.float16) for name, shape in TENSORS.items()},
        {**LAYOUT, "plain": ((5, 4), torch.bfloat16)},
        {name: LAYOUT[name] for name in TENSORS if name != "doubled"},
        {**LAYOUT, "other": ((3,), torch.bfloat16)},
    ],
    ids=["dtype", "shape", "missing", "additional"],
)
def test_another_layout_than_expected_is_recorded_when_it_is_published(trainer: Trainer, layout: Layout) -> None:
    model = CountingModel()
    receiver = WeightReceiver(model)
    with suppress(RuntimeError):  # of copy_, between different shapes
        receiver.record_ahead(layout)
    num_recorded = model.num_recorded
    receive(receiver, trainer.publish(0))
    assert model.num_recorded > num_recorded
    assert_holds(model, expected(trainer))


def test_recording_takes_no_page_of_sleeping_parameters(trainer: Trainer) -> None:
    allocator = rank_allocator("cpu")
    with allocator.region(MemoryTag.WEIGHTS):
        model = AwkwardModel()
    rank = EngineRank(model, allocator, rank=0)
    rank.memory.pause(PauseRequest(tags=[MEMORY_TAG_WEIGHTS]))
    rank.receiver.record_ahead(LAYOUT)
    assert allocator.arena(MemoryTag.WEIGHTS).usage().mapped_bytes == 0
    rank.memory.resume(ResumeRequest(tags=[MEMORY_TAG_WEIGHTS]))
    receive(rank.receiver, trainer.publish(0))
    assert_holds(model, expected(trainer))
