"""A checkpoint on disk, and the same weights as trainer ranks publish them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from tasuki.v1 import weights_pb2
from tasuki.weights.export import WeightExport
from tests.models import make_model, save_checkpoint, trainer_shards
from tests.slices import Cut, by_rows


class Published:
    """A model in both forms, as version 3; `message` describes the published one.

    devices: one per trainer rank. cut: how the ranks shard a parameter. source_dtype: of the trainer's weights; the checkpoint and the
    published weights are bfloat16.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        stack: ExitStack,
        *,
        devices: Sequence[str] = ("cpu", "cpu"),
        cut: Cut = by_rows,
        source_dtype: torch.dtype = torch.float32,
    ) -> None:
        model = make_model(kind, seed=1)
        self.folder = save_checkpoint(model, folder / "model")
        self.exports: list[WeightExport] = []
        num_ranks = len(devices)
        for rank, device in enumerate(devices):
            shards = [
                replace(shard, local=shard.local.to(device=device, dtype=None if shard.keeps_dtype else source_dtype))
                for shard in trainer_shards(model, rank=rank, num_ranks=num_ranks, cut=cut)
            ]
            export = WeightExport(
                shards, rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=folder / f"w{rank}.sock"
            )
            stack.callback(export.close)
            self.exports.append(export)
        handles = [export.handle() for export in self.exports]
        self.message = weights_pb2.PublishedWeights(boot_id=str(folder), handles=handles)
        self.publish(3)

    def publish(self, version: int) -> None:
        for export in self.exports:
            export.publish(version)
        self.message.policy_version = version
