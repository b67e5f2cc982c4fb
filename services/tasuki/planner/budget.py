"""Checks that a node can start within its configured memory budget on a CPU."""

from __future__ import annotations

from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.planner.rollout_bytes import engine_weights, kv_pool
from tasuki.planner.trainer_bytes import trainer_tags
from tasuki.wire.errors import InvalidArgument

_FIELD = "memory.host_budget_bytes"


def check_host_budget(config: NodeConfig) -> None:
    """Raises InvalidArgument if a rank's share of the budget cannot hold the tags that it creates at start."""
    budget = config.memory.host_budget_bytes
    if budget is None:
        return
    shape = read_model_shape(config.model.path)
    layout = node_layout(config, shape, gpu_bytes=host_memory().total_bytes, host_bytes=budget)
    of_trainer = {str(part): size for part, size in trainer_tags(layout).items()}
    of_engine = {"rollout weights": engine_weights(layout), "KV cache": kv_pool(layout, taken_bytes=0).num_bytes}
    for name, num_ranks, tags in (
        ("trainer", config.trainer.num_ranks, of_trainer),
        ("rollout", config.num_engine_ranks, of_engine),
    ):
        needed, share = sum(tags.values()), budget // num_ranks
        if needed > share:
            parts = ", ".join(f"{tag} {size}" for tag, size in tags.items())
            raise InvalidArgument(
                _FIELD,
                f"{budget} bytes are {share} for each of the {num_ranks} {name} ranks, and one takes {needed} in whole chunks when it"
                f" starts ({parts}); give at least {needed * num_ranks}",
                needed_bytes=needed * num_ranks,
            )
