"""Tokens of a micro-batch if the configuration leaves them open, and the cost of a sample under each role."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.train import check_longest_sample
from tasuki.config.schema import NodeConfig
from tasuki.planner.choose import most_tokens, with_fastest_checkpointing, with_last_layer_kept
from tasuki.planner.node import GB, MARGIN, Checkpointing, Node
from tasuki.planner.plan import plan
from tasuki.trainer.serve import sample_costs
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import Stage
from tests.planned import chosen_node, config_of, node_with

ROLLOUT = {"kv_ratio": 0.3}
NODE = node_with(num_ranks=4, rollout=ROLLOUT, checkpointing=Checkpointing.FULL, trainer={"prefix_sharing": False})


def enough_for(tokens: int) -> Node:
    """Node whose GPUs are just large enough for `tokens`: at the peak, in SYNC, the memory cached by a step is still there."""
    peak = plan(replace(NODE, micro_batch_tokens=tokens)).gpu_peak
    assert peak.stage in (Stage.RESUME_WEIGHTS, Stage.SYNC)
    return replace(NODE, gpu_bytes=peak.gpu_bytes + MARGIN)


@pytest.mark.parametrize("tokens", [16_384, 8192, 4096, 2048, 1024])
def test_the_planner_takes_the_most_tokens_with_which_everything_fits(tokens: int) -> None:
    full = enough_for(tokens)
    assert plan(replace(full, micro_batch_tokens=tokens)).fits
    assert most_tokens(full) == tokens
    short = replace(full, gpu_bytes=full.gpu_bytes - 1)
    assert most_tokens(short) == max(1024, tokens // 2)


def test_a_sequence_that_rollout_serves_fits_into_a_micro_batch() -> None:
    size = enough_for(1024).gpu_bytes
    for context_length, tokens in ((3000, 4096), (30_000, 16_384)):
        assert (
            most_tokens(node_with(num_ranks=4, gpu_bytes=size, rollout=ROLLOUT | {"context_length": context_length})) == tokens
        )


def test_the_planner_keeps_as_much_for_backward_as_there_is_room_for() -> None:
    node, rungs = NODE, list(Checkpointing)
    peaks = [plan(replace(node, checkpointing=rung)).gpu_peak for rung in rungs]
    for rung, slower, peak in zip(rungs, [*rungs[1:], rungs[-1]], peaks, strict=True):
        just = replace(node, gpu_bytes=peak.gpu_bytes + MARGIN)
        assert with_fastest_checkpointing(just).checkpointing is rung
        assert with_fastest_checkpointing(replace(just, gpu_bytes=just.gpu_bytes - 1)).checkpointing is slower
    short = replace(just, host_bytes=plan(node).host_peak.host_bytes + MARGIN)
    assert with_fastest_checkpointing(short).checkpointing is Checkpointing.FULL, (
        "nothing is held on a host without room for it"
    )


def test_layers_that_there_is_room_for_keep_everything() -> None:
    for gpu_gb in (80, 90, 100, 115):
        node = with_fastest_checkpointing(replace(NODE, gpu_bytes=gpu_gb * GB))
        assert node.checkpointing is Checkpointing.ATTENTION
        wary = replace(node, gpu_bytes=int(0.95 * node.gpu_bytes))
        assert plan(wary).fits and not plan(replace(wary, kept_layers=node.kept_layers + 1)).fits
    assert with_fastest_checkpointing(NODE) == replace(NODE, checkpointing=Checkpointing.NONE)
    tight = replace(NODE, gpu_bytes=60 * GB)
    assert with_fastest_checkpointing(tight).kept_layers == 0


@pytest.mark.parametrize("rung", [Checkpointing.ATTENTION, Checkpointing.FULL])
def test_the_last_layer_is_kept_where_no_stage_is_larger_for_it(rung: Checkpointing) -> None:
    node = replace(NODE, checkpointing=rung)
    kept = with_last_layer_kept(node)
    assert kept == replace(node, kept_layers=1)
    stages = zip(plan(kept).stages, plan(node).stages, strict=True)
    assert all(one.gpu_bytes <= other.gpu_bytes for one, other in stages)
    two = replace(node, kept_layers=2)
    assert plan(two).gpu_peak.gpu_bytes > plan(node).gpu_peak.gpu_bytes, "a second one is not free"
    assert with_last_layer_kept(two) == two, "more than the last one is a choice already made"


@pytest.mark.parametrize(
    "settings", [{"checkpointing": Checkpointing.NONE}, {"device": "cpu", "checkpointing": Checkpointing.FULL}]
)
def test_a_last_layer_that_is_kept_already_or_never_stays_so(settings: dict[str, Any]) -> None:
    node = node_with(num_ranks=4, rollout=ROLLOUT, **settings)
    assert with_last_layer_kept(node) == node


def test_what_tokens_cannot_mend_does_not_lower_them() -> None:
    for changed in (node_with(num_ranks=4, rollout={"kv_ratio": 0.98}), replace(NODE, host_bytes=GB)):
        assert not plan(changed).fits
        assert most_tokens(changed) == 16_384


def node(device: str, **trainer: Any) -> Node:
    config = config_of(device=device, trainer={"checkpointing": "full", "num_ranks": 4, **trainer}, rollout=ROLLOUT)
    return chosen_node(config, NODE.model, gpu_bytes=70 * GB)


def test_a_node_on_a_gpu_has_what_the_planner_takes_unless_it_is_told() -> None:
    assert node("cuda").micro_batch_tokens == 8192
    assert plan(node("cuda")).fits
    assert not plan(node("cuda", micro_batch_tokens=16_384)).fits
    assert node("cuda", micro_batch_tokens=5000).micro_batch_tokens == 5000


def test_a_node_on_a_cpu_has_as_many_as_always() -> None:
    assert node("cpu").micro_batch_tokens == 8192


QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 32_768,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def config_on(model: Path, *, device: str = "cuda", **trainer: Any) -> NodeConfig:
    tables = {"trainer": {"checkpointing": "full", "num_ranks": 4, **trainer}, "rollout": {"kv_ratio": 0.3}}
    return NodeConfig.model_validate({"state_dir": model, "device": device, "model": {"path": model}, **tables})


def test_each_role_has_the_cost_of_its_network(model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 14}))
    costs = sample_costs(config_on(model, lora={}, critic={"path": small}))
    assert set(costs) == set(Role)
    assert costs[Role.POLICY].linear == costs[Role.REFERENCE].linear * 4 / 6
    assert costs[Role.POLICY].quadratic == costs[Role.REFERENCE].quadratic == 2 * costs[Role.CRITIC].quadratic
    own = sample_costs(config_on(model, critic={}))
    assert own[Role.CRITIC].linear == own[Role.POLICY].linear
    assert (own[Role.CRITIC].head, own[Role.POLICY].head) == (6 * 3584, 6 * 3584 * 152_064)
    assert Role.CRITIC not in sample_costs(config_on(model))


def test_a_run_with_samples_above_the_node_s_micro_batches_is_refused_with_both_numbers() -> None:
    check_longest_sample(64, limit=64)
    with pytest.raises(InvalidArgument, match=r"trainer.micro_batch_tokens: is 64 on this node.* 65 tokens"):
        check_longest_sample(65, limit=64)
