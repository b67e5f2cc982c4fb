"""Choices made by `tasuki up` before a node starts, and its report by `tasuki plan`."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.choices import Choices
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import HostMemory
from tasuki.node import choose as cli
from tasuki.node.choose import choose
from tasuki.node.start import start_node
from tasuki.planner.node import GB
from tasuki.planner.plan import plan
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import Stage
from tests.planned import chosen_node
from tests.sparse_weights import write_sparse_weights
from tests.unit.memory_folder import write_tokenizer

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
TRAIN = """
[train]
dataset = "d.jsonl"
output_dir = "out"
prompts_per_step = 8
group_size = 8
max_prompt_tokens = 256
max_new_tokens = 256
[train.reward]
function = "a:b"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def node(model: Path, **tables: Any) -> NodeConfig:
    return NodeConfig.model_validate({"state_dir": model / "node", "model": {"path": model}, "device": "cuda", **tables})


def chosen(config: NodeConfig, told: list[str] | None = None) -> Choices:
    return choose(config, resumes=False, tell=[].append if told is None else told.append)


def test_a_choice_counts_the_tokens_and_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "smallest_gpu_bytes", lambda: 80 * GB)
    told: list[str] = []
    decided = chosen(node(model, rollout={"engine": {"max_total_tokens": 20_000}}), told)
    assert decided.kv_tokens == 20_000
    assert set(decided.trainer[0]) == {"weights", "gradients", "optimizer", "export", "cache"}
    assert set(decided.rollout[0]) == {"weights", "kv_cache"}
    assert len(told) == 2 and told[0].startswith("GPU 0: keeps trainer weights") and told[0].endswith("releases nothing")
    assert decided.starts_together and told[1].startswith("trainer and rollout start at the same time")
    assert chosen(node(model)).kv_tokens is None, "the engine measures what kv_ratio leaves"


def test_where_nobody_says_how_large_a_gpu_is_nothing_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "smallest_gpu_bytes", lambda: None)
    monkeypatch.setattr(cli, "_CUDA_SIZES", "raise SystemExit('no driver')")
    with pytest.raises(InvalidArgument, match="neither NVML nor CUDA reports the memory"):
        chosen(node(model))
    monkeypatch.setattr(cli, "_CUDA_SIZES", f"print({80 * GB})")
    assert chosen(node(model)).trainer[0]


def test_on_a_cpu_the_machines_memory_or_its_budget_decides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(64 * GB, 32 * GB))
    roomy = chosen(node(model, device="cpu", rollout={"engine": {"max_total_tokens": 4096}}))
    held = chosen(
        node(model, device="cpu", rollout={"engine": {"max_total_tokens": 4096}}, memory={"host_budget_bytes": 3 * GB})
    )
    assert roomy.kv_tokens == 4096
    assert set(held.trainer[0]) < set(roomy.trainer[0]) == {"weights", "gradients", "optimizer", "export"}


def test_a_node_that_does_not_fit_into_free_memory_is_named_at_its_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    config = node(model, device="cpu", trainer={"num_ranks": 16}, rollout={"engine": {"max_total_tokens": 4096}})
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(256 * GB, 200 * GB))
    chosen(config, told)
    assert [line.split(":")[0] for line in told] == ["rank 0", "ranks 1-15"]
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(256 * GB, 20 * GB))
    chosen(config, told)
    assert told[-1].startswith("the plan does not fit: the host needs ") and "starts all the same" in told[-1]


def test_a_plan_of_too_many_ranks_on_a_cpu_advises_fewer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "crowd.toml"
    config.write_text(f"state_dir = 'node'\n[model]\npath = '{model}'\n[trainer]\nnum_ranks = 24\n")
    assert main(["plan", str(config), "--host-gb", "24"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Change trainer.num_ranks: 24 -> \d+: TRAIN [\d.]+ GB, fits", said) and "GPU" not in said
    assert "24 FSDP ranks" in said and "million parameters: embedding 32.8 million" in said


def test_a_refused_start_leaves_nothing_open(model: Path) -> None:
    write_sparse_weights(model)
    write_tokenizer(model)
    config = node(model, device="cpu", rollout={"engine": {"max_total_tokens": 8}})
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InvalidArgument, match=r"rollout.engine.max_total_tokens: = 8 cannot hold one sequence"):
        start_node(config)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("missing_bytes", "code"), [(0, 0), (1, 1)])
def test_a_budget_below_the_tags_of_a_stage_does_not_fit(
    missing_bytes: int, code: int, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(64 * GB, 32 * GB))
    tables = {"device": "cpu", "rollout": {"engine": {"max_total_tokens": 4096}}}
    planned = chosen_node(node(model, **tables), host_bytes=64 * GB)
    peak = plan(planned.keeping(frozenset())).budget_peak
    assert peak.stage is Stage.RESUME_WEIGHTS
    budget = peak.tag_bytes - missing_bytes
    told: list[str] = []
    chosen(node(model, **tables, memory={"host_budget_bytes": budget}), told)
    problem = f"the tags take {peak.tag_bytes} bytes in RESUME_WEIGHTS, and memory.host_budget_bytes is {budget}"
    assert [problem in line for line in told] == [False] + [True] * missing_bytes
    (model / "node.toml").write_text(
        f'state_dir = "node"\n[model]\npath = "{model}"\n[rollout]\nengine.max_total_tokens = 4096\n'
        f"[memory]\nhost_budget_bytes = {budget}\n"
    )
    assert main(["plan", str(model / "node.toml"), "--host-gb", "64"]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert (problem in printed) is bool(missing_bytes)
    if missing_bytes:
        assert f"Change memory.host_budget_bytes: {budget} -> {peak.tag_bytes}" in printed


def test_a_budget_that_fits_neither_a_copy_nor_merging_in_place_is_told_the_smaller_need(model: Path) -> None:
    tables = {"device": "cpu", "trainer": {"lora": {"rank": 8}}, "rollout": {"engine": {"max_total_tokens": 4096}}}
    made = chosen_node(node(model, **tables), host_bytes=64 * GB).keeping(frozenset())
    copied, in_place = (plan(replace(made, merges_in_place=merges)).budget_peak.tag_bytes for merges in (False, True))
    assert in_place < copied
    for budget in (in_place, in_place - 1):
        planned = plan(chosen_node(node(model, **tables, memory={"host_budget_bytes": budget}), host_bytes=64 * GB))
        assert (planned.fits, planned.budget_peak.tag_bytes) == (budget == in_place, in_place)
