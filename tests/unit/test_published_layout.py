"""The layout that rollout expects, against what the trainer's ranks publish."""

from pathlib import Path

import pytest
import torch

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rollout.record import published_layout
from tests.models import CONFIGS, make_model, trainer_shards


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_is_published_as_expected(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, seed=0)
    model.config.save_pretrained(tmp_path)
    shards = [shard for rank in range(3) for shard in trainer_shards(model, rank=rank, num_ranks=3)]
    published = {shard.name: (shard.global_shape, torch.float32 if shard.keeps_dtype else torch.bfloat16) for shard in shards}
    config = NodeConfig(state_dir=tmp_path, model=ModelConfig(path=tmp_path))
    assert published_layout(config) == published
