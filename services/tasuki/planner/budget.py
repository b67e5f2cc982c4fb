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
_MIB = 1 << 20
_RANK_MIB = {"trainer.num_ranks": 200, "rollout.tp_size": 400}
"""Memory of a rank's process on a CPU without any model. Measured: 220 MiB of a trainer's, which is a fork, and 500 of an engine's."""


def check_room_for_ranks(config: NodeConfig) -> None:
    """Raises InvalidArgument if this machine cannot hold the processes of the configured ranks. On a CPU no number of GPUs bounds them."""
    if config.device != "cpu":
        return
    total_mib = host_memory().total_bytes // _MIB
    for field, num_ranks in (("trainer.num_ranks", config.trainer.num_ranks), ("rollout.tp_size", config.num_engine_ranks)):
        needed_mib = num_ranks * _RANK_MIB[field]
        if needed_mib > total_mib:
            raise InvalidArgument(
                field, f"makes {num_ranks} processes, which take {needed_mib} MiB or more; this machine has {total_mib} MiB"
            )


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
