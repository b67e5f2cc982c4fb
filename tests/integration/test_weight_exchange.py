"""A sync against SGLang itself loading the exported checkpoint from disk: every parameter, bit for bit, after poisoning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.transport.export import WeightExport
from tasuki.transport.imported_weights import import_weights
from tasuki.transport.verify import check_received
from tasuki.v1 import weights_pb2
from tests.integration.engine_rank import EngineRanks, engine_ranks, pieces_of
from tests.models import CONFIGS, make_model, save_checkpoint, trainer_shards

NUM_TRAINER_RANKS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[EngineRanks]:
    with engine_ranks() as ranks:
        yield ranks


class Published:
    """A checkpoint on disk and the same weights published by trainer ranks, as version 3."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        model = make_model(kind, seed=1)
        self.folder = save_checkpoint(model, folder / "model")
        self.exports: list[WeightExport] = []
        for rank in range(NUM_TRAINER_RANKS):
            shards = trainer_shards(model, rank=rank, num_ranks=NUM_TRAINER_RANKS)
            export = WeightExport(
                shards, rank=rank, num_ranks=NUM_TRAINER_RANKS, dtype=torch.bfloat16, socket_path=folder / f"w{rank}.sock"
            )
            stack.callback(export.close)
            export.publish(3)
            self.exports.append(export)
        handles = [export.handle() for export in self.exports]
        self.message = weights_pb2.PublishedWeights(policy_version=3, boot_id=str(folder), handles=handles)


# All of TP 2 first: from then on the first rank is a group of its own.
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("tp_size", [2, 1])
def test_sync_equals_loading_the_checkpoint_from_disk(ranks: EngineRanks, kind: str, tp_size: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        published = Published(kind, tmp_path, stack)
        outcomes = ranks.receive(published.folder, published.message, tp_size=tp_size)
        assert [outcome.different for outcome in outcomes] == [[]] * tp_size
        assert all(outcome.fallback_names == () for outcome in outcomes)
        # The last rank holds the padding rows of the vocabulary, which only a recorded constant fills.
        assert outcomes[-1].num_constants > 0
        check_received(pieces_of(outcomes), import_weights(published.message, timeout_s=5))
