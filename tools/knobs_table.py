"""Prints the tables of docs/reference/trainer.md: cost and gain of settings by `tasuki plan`. Usage: python tools/knobs_table.py"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tasuki.algorithms.vocabulary_tiles import most_logits
from tasuki.config.load import changed
from tasuki.config.schema import ModelConfig, NodeConfig, RolloutConfig
from tasuki.config.trainer_schema import TrainerConfig
from tasuki.planner.node import GB, Node, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.planner.presets import MODELS
from tasuki.wire.stages import Phase, Stage

BASE = NodeConfig(
    state_dir=Path("node"), device="cuda", model=ModelConfig(path=Path("qwen2.5-7b")),
    trainer=TrainerConfig(num_ranks=2, checkpointing="full"), rollout=RolloutConfig(tp_size=2, kv_ratio=0.8),
)  # fmt: skip
"""7B on two GPUs of 141 GB: every parameter, float32 masters, 16,384 tokens a micro-batch, layers recomputed."""

EXPERTS = NodeConfig(
    state_dir=Path("node"), device="cuda", model=ModelConfig(path=Path("qwen3-30b-a3b")),
    trainer=TrainerConfig(num_ranks=8, checkpointing="full"), rollout=RolloutConfig(tp_size=4, kv_ratio=0.6),
)  # fmt: skip
"""30B-A3B on eight GPUs of 141 GB, otherwise the same."""


_TABLE = re.compile(r"^\| setting \| TRAIN \|.*\n(\|.*\n)*", re.MULTILINE)


class Knob(NamedTuple):
    setting: str
    changes: dict[str, Any]
    """Keys, and `kept_layers`, which the planner chooses."""
    cost: str
    tokens_per_s: str = ""
    """A GPU whose figures are measured (docs/benchmarks.md)."""


def _planned(base: NodeConfig, changes: dict[str, Any]) -> Plan:
    """Nothing stays but what the engine reads."""
    keys = {key: value for key, value in changes.items() if key != "kept_layers"}
    shape = MODELS[base.model.path.name]
    node = node_of(changed(base, keys), shape, gpu_bytes=141 * GB, host_bytes=2000 * GB)
    return plan(replace(node.keeping(node.published), kept_layers=changes.get("kept_layers", 0)))


def _fewer_kv_tokens(kv_ratio: float) -> int:
    return _planned(BASE, {}).kv_pool.num_tokens - _planned(BASE, {"rollout.kv_ratio": kv_ratio}).kv_pool.num_tokens


def _untiled_bytes() -> int:
    """Bytes that untiled logits take beyond one tile's: float32 for all positions, plus a gradient in the compute dtype."""
    node: Node = _planned(BASE, {}).node
    model, places = node.model, node.rank_tokens
    tile = most_logits(places, hidden_size=model.hidden_size, vocab_size=model.num_outputs, device=node.device)
    return (4 + node.compute_bytes) * (places * model.num_outputs - tile)


KNOBS = (
    Knob('`checkpointing = "none"`', {"trainer.checkpointing": "none"}, "no recomputation", "11,648 *"),
    Knob(
        '`checkpointing = "attention"`',
        {"trainer.checkpointing": "attention"},
        "recomputes all but attention",
        "10,744 *",
    ),
    Knob(
        '`checkpointing = "attention"`, 19 layers kept',
        {"trainer.checkpointing": "attention", "kept_layers": 19},
        "the same, of nine layers",
        "12,021",
    ),
    Knob('`checkpointing = "offloaded"`', {"trainer.checkpointing": "offloaded"}, "copies overlap computation"),
    Knob(
        '`checkpointing = "offloaded"`, 5 layers kept',
        {"trainer.checkpointing": "offloaded", "kept_layers": 5},
        "the same",
        "11,017",
    ),
    Knob(
        "`micro_batch_tokens = 8192`", {"trainer.micro_batch_tokens": 8192}, "parameters and gradients are sent twice as often"
    ),
    Knob("`micro_batch_tokens = 65536`", {"trainer.micro_batch_tokens": 65_536}, "none; for long samples"),
    Knob(
        "`micro_batch_tokens = 65536`, `sequence_parallel = 2`",
        {"trainer.micro_batch_tokens": 65_536, "trainer.sequence_parallel": 2},
        "two exchanges in each layer's attention",
        "5,094 *",
    ),
    Knob(
        "`micro_batch_tokens = 65536`, `mlp_tile_tokens = 8192`",
        {"trainer.micro_batch_tokens": 65_536, "trainer.mlp_tile_tokens": 8192},
        "recomputes the MLP once more; not timed on a GPU",
    ),
    Knob("`prefix_sharing = true`", {}, "two calls in each layer's attention, for fewer tokens"),
    Knob(
        '`moments = "host"`',
        {"trainer.moments": "host"},
        "streams both moments through the GPU in each step",
        "8,996 *",
    ),
    Knob('`moments = "8bit"`', {"trainer.moments": "8bit"}, "changes the numbers", "9,559 *"),
    Knob(
        "a KL reference: `[train]` with `loss.kl_coef` or `advantages.kl_coef`",
        {"trainer.reference_on_host": False},
        "one more forward pass of each sample",
    ),
    Knob(
        "the same, `reference_on_host = true`",
        {"trainer.reference_on_host": True},
        "copies the reference to the GPU in each micro-batch that it scores; not measured",
    ),
    Knob('`param_dtype = "bfloat16"`', {"trainer.param_dtype": "bfloat16"}, "small updates are lost: [config.md](config.md)"),
    Knob(
        "`rollout.kv_ratio = 0.6`", {"rollout.kv_ratio": 0.6}, f"{_fewer_kv_tokens(0.6):,} fewer tokens in rollout's KV cache"
    ),
    Knob(
        '`compile = "blocks"`',
        {"trainer.compile": "blocks"},
        "compiles at the start; 1 to 6 % faster at 1.5B, 5 % slower at 7B",
    ),
    Knob("LM head in tiles: no setting, always on", {}, f"all logits at once would take {_untiled_bytes() / GB:.1f} GB more"),
    Knob("`[trainer.lora]`, rank 32", {"trainer.lora.rank": 32, "rollout.lora": "adapter"}, "trains only adapters"),
    Knob("`num_ranks = 4`, on four GPUs", {"trainer.num_ranks": 4, "rollout.dp_size": 1}, "two more GPUs"),
)


EXPERT_KNOBS = (
    Knob(
        "`expert_parallel = true`",
        {"trainer.expert_parallel": True},
        "rows travel to their experts and back; not compared on a GPU",
    ),
    Knob(
        "the same, `micro_batch_tokens = 8192`",
        {"trainer.expert_parallel": True, "trainer.micro_batch_tokens": 8192},
        "sends the other parameters twice as often",
    ),
)


def table() -> str:
    """Formats bytes in GB: the fullest GPU in training and during a weight sync, and the host's maximum."""
    return "".join(_lines(BASE, KNOBS, tokens_per_s="10,599 *"))


def experts_table() -> str:
    """Formats the row of a mixture of experts."""
    return "".join(_lines(EXPERTS, EXPERT_KNOBS, tokens_per_s=""))


def _lines(base: NodeConfig, knobs: Sequence[Knob], *, tokens_per_s: str) -> Iterator[str]:
    yield "| setting | TRAIN | SYNC | host | its cost | tokens/s |\n|---|--:|--:|--:|---|--:|\n"
    start = _gigabytes(_planned(base, {}))
    yield "| as above | {:.1f} | {:.1f} | {:.1f} | | {} |\n".format(*start, tokens_per_s)
    for knob in knobs:
        changes = (now - then for now, then in zip(_gigabytes(_planned(base, knob.changes)), start, strict=True))
        sizes = " | ".join(f"{_signed(change)}" for change in changes)
        yield f"| {knob.setting} | {sizes} | {knob.cost} | {knob.tokens_per_s} |\n"


def _gigabytes(planned: Plan) -> tuple[float, float, float]:
    sizes = planned.stage(Phase.TRAIN).gpu_bytes, planned.stage(Stage.SYNC).gpu_bytes, planned.host_peak.host_bytes
    return sizes[0] / GB, sizes[1] / GB, sizes[2] / GB


def _signed(change: float) -> str:
    return "" if abs(change) < 0.05 else f"{change:+.1f}"


def trainer_page(text: str) -> str:
    """Returns docs/reference/trainer.md with its two tables updated."""
    tables = iter((table(), experts_table()))
    return _TABLE.sub(lambda _: next(tables), text)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n{experts_table()}")
