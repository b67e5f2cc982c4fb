"""Choices of a node for tests that start its services, or a trainer's ranks, without `tasuki up`."""

from tasuki.config.choices import Choices, write_choices
from tasuki.config.schema import NodeConfig
from tasuki.planner.choose import choices_of
from tasuki.planner.node import GB
from tasuki.wire.errors import TasukiError
from tests.planned import chosen_node


def choices_for(config: NodeConfig, *, export_stays: bool = True, **changes: object) -> Choices:
    """The planner's for a large machine, except that all memory leaves at each changeover but, perhaps, what the engine reads."""
    try:
        made = choices_of(chosen_node(config, gpu_bytes=80 * GB))
    except TasukiError:  # the service will refuse it, too
        made = Choices(micro_batch_tokens=8192, checkpointing="none", kv_tokens=4096)
    stays = {"trainer": [["export"] if export_stays else []] * config.trainer.num_ranks, "rollout": []}
    return Choices.model_validate({**made.model_dump(), **stays, **changes})


def write_plan(config: NodeConfig, *, export_stays: bool = True, **changes: object) -> None:
    """Writes the file that the node's services read."""
    config.state_dir.mkdir(parents=True, exist_ok=True)
    write_choices(choices_for(config, export_stays=export_stays, **changes), config.state_dir)
