"""Names, shapes and dtype of the tensors that a trainer of full weights publishes, from the model's configuration."""

from __future__ import annotations

import torch

from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import read_json_object
from tasuki.models.families import find_family, read_model
from tasuki.models.family import CheckpointNames
from tasuki.rollout.record import Layout


def published_layout(config: NodeConfig) -> Layout:
    """The checkpoint's tensors in the engine's dtype, named and cut as by `weights.shards.checkpoint_shards`.

    Raises UnsupportedModel for an unknown model, InvalidArgument for a damaged config.json.
    """
    shape = read_model(read_json_object(config.model.path / "config.json", field="model.path")).shape
    names, dtype = find_family(shape.architecture).checkpoint, getattr(torch, config.rollout.dtype)
    tensors: dict[str, tuple[int, ...]] = {}
    for name, sizes in shape.parameters().items():
        tensors |= _experts(name, sizes, names) or {names.tensor(name): sizes}
    return {name: (sizes, dtype) for name, sizes in tensors.items()}


def _experts(name: str, sizes: tuple[int, ...], names: CheckpointNames) -> dict[str, tuple[int, ...]]:
    """The tensors of every expert in a fused parameter; empty for any other."""
    parts = names.fused(name)
    if not parts:
        return {}
    num_experts, rows, columns = sizes
    return {names.expert(name, index, part): (rows // len(parts), columns) for index in range(num_experts) for part in parts}
