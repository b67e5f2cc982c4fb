"""`tasuki plan`: input, answers and picture."""

import json
import os
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.memory.host import HostMemory, host_memory
from tasuki.planner.plan import PLAN_STAGES
from tasuki.planner.presets import PRESETS

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "node.toml"
    file.write_text(
        'state_dir = "node"\ndevice = "cuda"\n[model]\npath = "model"\n[trainer]\nnum_ranks = 2\n[rollout]\ndp_size = 1\n'
    )
    return file


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prints_every_stage_and_the_answers(name: str, capsys: pytest.CaptureFixture[str]):
    fits = name != "70b+"
    assert main(["plan", "--preset", name]) == (0 if fits else 1)
    printed = capsys.readouterr().out
    assert all(stage in printed for stage in PLAN_STAGES)
    assert printed.startswith("It fits: " if fits else "It does NOT fit: ")
    for answer in ("GPU peak: ", "Host peak: ", "GPUs 0-7: keeps ", "Largest KV ratio: "):
        assert answer in printed
    assert ("trainer.moments: gpu -> host: " in printed) is not fits


@pytest.mark.parametrize(("settings", "num_checkpoints"), [
    (["num_steps=100", "save_every=10"], 5), (["num_steps=100", "save_every=10", "keep_last=1"], 3), (["num_steps=30", "save_every=10"], 3),
    (["num_steps=100"], 0), (["save_every=10"], 5),
])  # fmt: skip
def test_the_disk_of_a_run_is_told(node: Path, capsys: pytest.CaptureFixture[str], settings: list[str], num_checkpoints: int):
    given = ['sft.dataset="rows.jsonl"', 'sft.output_dir="run"', *(f"sft.{setting}" for setting in settings)]
    main(["plan", str(node), "--gpu-gb", "80", *(argument for each in given for argument in ("--set", each))])
    # 149,440 parameters in bfloat16, and three float32 numbers for each in a checkpoint.
    checkpoint, whole = 149_440 * 12 / 1e9, 149_440 * (2 + 12 * num_checkpoints) / 1e9
    kept = f" and up to {num_checkpoints} checkpoints of {checkpoint:.3f} GB" if num_checkpoints else ""
    assert f"Disk: {whole:.3f} GB for the model{kept}." in capsys.readouterr().out.replace("\n", " ")


def test_a_nodes_configuration_is_planned_unchanged(node: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", str(node), "--gpu-gb", "80", "--host-gb", "100", "--set", "rollout.kv_ratio=0.5", "--json"]
    assert main(arguments) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] and planned["gpu_bytes"] == 80 * 10**9
    assert [stage["stage"] for stage in planned["stages"]] == list(PLAN_STAGES)
    served = next(stage for stage in planned["stages"] if stage["stage"] == "ROLLOUT")
    _, with_engine, without = ({part["part"]: part["bytes"] for part in device["parts"]} for device in served["devices"])
    assert with_engine["kv_cache"] == planned["kv_cache_bytes"] and "kv_cache" not in without
    # 0.5 of the memory beside contexts, weights included.
    assert 38e9 < planned["kv_cache_bytes"] < 40e9


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_model_alone_is_planned_by_flags(node: Path, as_folder: bool, capsys: pytest.CaptureFixture[str]):
    model = node.parent / "model" if as_folder else node.parent / "model" / "config.json"
    sets = [word for key in ("rollout.tp_size=2", "trainer.micro_batch_tokens=2048") for word in ("--set", key)]
    flags = ["--gpus", "4", "--gpu-gb", "24", "--json", *sets]
    assert main(["plan", str(model), *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"][0]["devices"]) == 5


def test_what_does_not_fit_exits_1_with_a_change_that_fits(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--preset", "balanced", "--set", "rollout.kv_ratio=0.98", "--json"]) == 1
    planned = json.loads(capsys.readouterr().out)
    assert planned["problems"] == [planned["problems"][0]] and "a GPU needs" in planned["problems"][0]
    last = planned["advice"][-1]
    assert last["fits"] and last["setting"] == "rollout.kv_ratio" and float(last["new"]) == planned["max_kv_ratio"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "CONFIG"),
        (["--preset", "huge"], "preset"),
        (["{model}"], "gpu-gb"),
        (["{node}"], "gpu-gb"),
        (["{node}", "--gpu-gb", "80", "--preset", "balanced"], "preset"),
        (["{node}", "--gpu-gb", "80", "--set", "rollout.speed=2"], "rollout.speed"),
        (["{model}", "--gpu-gb", "80", "--gpus", "0"], "gpus: must be at least 1"),
        (["{model}", "--gpu-gb", "1e300"], "gpu-gb: must be at most 1e+09 GB"),
        (["{model}", "--gpu-gb", "80", "--set", "rollout.kv_ratio=1.5"], "rollout.kv_ratio: "),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    node: Path,
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    places = {"node": str(node), "model": str(node.parent / "model")}
    assert main(["plan", *(argument.format(**places) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tasuki: error ") and named in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["{node}", "--set", "rollout.tp_size=3"], "rollout.tp_size: 4 attention heads cannot be split over 3 ranks"),
        (["{node}", "--set", "rollout.dp_size=4096"], "rollout.dp_size makes 4096 ranks; one node has at most 1024"),
        (["{node}", "--gpus", "1"], "trainer.num_ranks: 2 ranks need as many GPUs; there are 1"),
        (["{node}", "--gpus", "2", "--set", "rollout.dp_size=4"], "rollout.dp_size: 4 engines of TP 1 need 4 GPUs, not 2"),
        (["{node}", "--gpus", "2", "--set", "rollout.tp_size=4"], "rollout.tp_size: 1 engines of TP 4 need 4 GPUs, not 2"),
        (
            ["{node}", "--set", "trainer.sequence_parallel=3"],
            "trainer.sequence_parallel = 3 does not divide trainer.num_ranks = 2",
        ),
        (
            ["{node}", "--set", "trainer.num_ranks=8", "--set", "trainer.sequence_parallel=8"],
            "trainer.sequence_parallel: 8 ranks cannot share 4 attention heads evenly",
        ),
        (["{node}", "--gpus", "2000"], "gpus: must be at most 1024 on one node, not 2000"),
    ],
)
def test_a_configuration_is_told_its_key(node: Path, arguments: list[str], cause: str, capsys: pytest.CaptureFixture[str]):
    places = {"node": str(node), "model": str(node.parent / "model")}
    assert main(["plan", "--gpu-gb", "80", *(argument.format(**places) for argument in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"tasuki: error INVALID_ARGUMENT: {cause}")


def test_gpus_that_no_engine_uses_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--preset", "balanced", "--gpus", "3", "--set", "rollout.tp_size=2"])
    assert "Without an engine: 1 of 3 GPUs, which idle in ROLLOUT" in capsys.readouterr().out
    main(["plan", "--preset", "balanced", "--gpus", "4", "--set", "rollout.tp_size=2"])
    assert "Without an engine" not in capsys.readouterr().out


def test_a_node_on_a_cpu_is_planned_with_this_machines_memory(node: Path, capsys: pytest.CaptureFixture[str]):
    for device, host_bytes in (("cpu", host_memory().total_bytes), ("cuda", 2000 * 10**9)):
        main(["plan", str(node), "--gpu-gb", "80", "--set", f'device="{device}"', "--json"])
        assert json.loads(capsys.readouterr().out)["host_bytes"] == host_bytes


def test_the_control_group_that_limits_the_host_is_named(
    node: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    limited = HostMemory(10**9, 10**9, Path("/sys/fs/cgroup/pod/memory.max"))
    monkeypatch.setattr("tasuki.cli.plan.host_memory", lambda: limited)
    for device, is_named in (("cpu", True), ("cuda", False)):
        main(["plan", str(node), "--gpu-gb", "80", "--set", f'device="{device}"'])
        assert ("of 1.0 GB that /sys/fs/cgroup/pod/memory.max allows" in capsys.readouterr().out) is is_named


def test_a_config_json_that_is_no_file_is_named_as_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert main(["plan", str(tmp_path), "--gpu-gb", "80"]) == 2
    assert "config.json is not a regular file; give a config.json or its folder" in capsys.readouterr().err
    (tmp_path / "README.md").touch()
    assert main(["plan", str(tmp_path / "README.md"), "--gpu-gb", "80"]) == 2
    assert "README.md is neither a node's .toml nor a model's config.json" in capsys.readouterr().err
