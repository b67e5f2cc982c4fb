"""Reads during a publication, publications during a sync, and misdirected copies: no such version counts as received."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.rollout import receive as receiving
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.rollout import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.v1.ranks_pb2 import ReceiveCommand, ReceiveResult
from tasuki.weights.copies import HostCopies, ViewCopy
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import VersionOrder, WeightsCorrupt
from tests.integration.awkward_model import TENSORS, AwkwardModel, Trainer, receive, trainer
from tests.integration.breaking_rank import BreakingRank
from tests.integration.exporting_rank import Replacing

__all__ = ["trainer"]


# --- a read during a publication


def rows_of(trainer: Trainer, look: Callable[[], None]) -> Replacing:
    """Writes the first rank's rows of a tensor, with a look before and after."""
    return Replacing("plain", lambda held: held.copy_(trainer.tensors["plain"][:3]), look=look)


def test_no_version_can_be_read_while_the_next_one_is_being_written(trainer: Trainer) -> None:
    imported = import_weights(trainer.publish(0), timeout_s=2)
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        for version in (0, 1):
            with pytest.raises(VersionOrder, match="trainer rank 0 holds writing"):
                imported.check_version(version)

    imported.check_version(0)
    trainer.exports[0].publish(1, replaced=rows_of(trainer, look))
    trainer.exports[1].publish(1)
    assert num_looks == 2
    imported.check_version(1)
    imported.close()


def test_a_publication_that_fails_in_the_middle_leaves_no_version(trainer: Trainer) -> None:
    def fail() -> None:
        raise MemoryError

    receiver = WeightReceiver(AwkwardModel())
    receive(receiver, trainer.publish(0))
    with pytest.raises(MemoryError):
        trainer.exports[0].publish(1, replaced=rows_of(trainer, fail))
    for version in (0, 1):
        with pytest.raises(VersionOrder, match="trainer rank 0 holds writing"):
            receiver.receive(trainer.handles(version), import_timeout_s=2)
    receive(receiver, trainer.publish(1))


# --- a publication during a sync


class InterruptedModel(AwkwardModel):
    """Calls `meanwhile` in the middle of its sync, between the copies and its own loading."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.meanwhile()
        super().load_weights(weights)


def test_a_publication_during_the_copy_is_noticed_by_the_rank(trainer: Trainer) -> None:
    """The version alone shows it: the values are equal."""
    model = InterruptedModel()
    receiver = WeightReceiver(model)
    receive(receiver, trainer.publish(0))
    weights = trainer.publish(1)
    model.meanwhile = lambda: trainer.publish(2)
    with pytest.raises(VersionOrder, match="asked for policy version 1, .* holds 2"):
        receiver.receive(weights, import_timeout_s=2)


async def test_a_publication_after_the_copy_is_noticed_by_the_front(trainer: Trainer, tmp_path: Path) -> None:
    """The rank has read all of version 0 and succeeds, but the published checksums are those of the next version."""

    class Overtaken(RankCalls):
        async def receive(self, receive: ReceiveCommand, *, timeout_s: float) -> list[ReceiveResult]:
            results = await super().receive(receive, timeout_s=timeout_s)
            trainer.publish(1)
            return results

    with ExitStack() as stack:
        rank = BreakingRank(list(TENSORS.items()), socket_dir=tmp_path)
        stack.callback(rank.close)
        calls = Overtaken(1, socket_dir=tmp_path)
        stack.callback(calls.close)
        sync = WeightSync(calls, socket_dir=tmp_path)
        stack.callback(sync.close)
        weights = trainer.publish(0)
        with pytest.raises(VersionOrder, match="asked for policy version 0, .* holds 1"):
            await sync.run(weights, await sync.prepare(weights), timeout_s=30)


# --- copies to wrong places; the checksums of what they wrote are right


def test_a_plan_that_was_lowered_wrongly_is_noticed_at_its_first_sync(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    def lowered_wrongly(copies: Sequence[ViewCopy], *, num_sums: int, **settings: Any) -> HostCopies:
        if "first_owner" in settings:  # not what reads back
            copies = [replace(copies[0], held=torch.empty_like(copies[0].held)), *copies[1:]]
        return HostCopies(copies, num_sums=num_sums)

    monkeypatch.setattr(receiving, "prepare_copies", lowered_wrongly)
    with pytest.raises(WeightsCorrupt, match=r"1 of 6 tensors.*plain: checksum differs \(engine rank 0\)"):
        receive(WeightReceiver(AwkwardModel()), trainer.publish(0))


def test_rows_that_must_be_constant_and_are_not_are_noticed_at_every_sync(trainer: Trainer) -> None:
    """Constant rows, such as the padding of a vocabulary, count in no published tensor's checksum."""
    model = AwkwardModel()
    receiver = WeightReceiver(model)
    receive(receiver, trainer.publish(0))
    receiver._recorded.fills = HostCopies([], num_sums=0)
    receive(receiver, trainer.publish(1))
    model.plain.data[7, 3] = 2**-133  # the smallest positive bfloat16
    with pytest.raises(WeightsCorrupt, match=r"plain: rows that must be 0.0 are not") as caught:
        receiver.receive(trainer.publish(2), import_timeout_s=2)
    assert caught.value.metadata == {"tensors": "plain"}
