"""Checks before a start that a CPU has memory for a node's ranks, and its configured budget for their tags."""

from __future__ import annotations

from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.planner.layout import gb
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.planner.rollout_bytes import engine_weights, kv_pool
from tasuki.planner.trainer_bytes import trainer_tags
from tasuki.wire.errors import InvalidArgument

_FIELD = "memory.host_budget_bytes"
# Of a rank on a CPU, beyond what it shares with the process that forked it; measured 100 MiB.
_LEAST_RANK_BYTES = 64 << 20


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


def check_host_ranks(config: NodeConfig) -> None:
    """Raises InvalidArgument if a CPU's memory cannot even hold the processes of the ranks, which would stop the whole machine."""
    num_ranks = config.trainer.num_ranks + config.num_engine_ranks
    needed, total = num_ranks * _LEAST_RANK_BYTES, host_memory().total_bytes
    if config.device == "cpu" and needed > total:
        key = "trainer.num_ranks" if config.trainer.num_ranks >= config.num_engine_ranks else "rollout.tp_size"
        text = f"makes {num_ranks} processes of trainer and rollout, which take at least {gb(needed)} GB; this machine has {gb(total)}"
        raise InvalidArgument(key, text, needed_bytes=needed)
