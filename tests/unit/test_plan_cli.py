"""`tasuki plan`: input, answers and picture."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import USER_ERROR, main
from tasuki.cli.plan import backend_lines, traffic_table
from tasuki.memory.host import HostMemory, host_memory
from tasuki.planner.advice import backend_plans
from tasuki.planner.plan import PLAN_STAGES, plan
from tasuki.planner.presets import MODELS, PRESETS
from tasuki.planner.trainer_bytes import node_traffic
from tests.planned import node_with

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


GPUS = ("--gpu-gb", "80")


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
    ("arguments", "told"),
    [
        ([], "CONFIG"),
        (["--preset", "huge"], "preset"),
        (["{model}"], "gpu-gb"),
        (["{node}"], "gpu-gb"),
        (["{node}", *GPUS, "--preset", "balanced"], "preset"),
        (["{node}", *GPUS, "--set", "rollout.speed=2"], "rollout.speed"),
        (["{model}", *GPUS, "--gpus", "0"], "gpus: must be at least 1"),
        (["{model}", "--gpu-gb", "1e300"], "gpu-gb: must be at most 1e+09 GB"),
        (["nowhere.toml"], "nowhere.toml"),
        (["{node}", *GPUS, "--set", "rollout.tp_size=3"], "rollout.tp_size: 4 attention heads cannot be split over 3 ranks"),
        (["{node}", *GPUS, "--set", "rollout.dp_size=4096"], "rollout.dp_size makes 4096 ranks; one node has at most 1024"),
        (["{node}", *GPUS, "--gpus", "1"], "trainer.num_ranks: 2 ranks need as many GPUs; there are 1"),
        (["{node}", *GPUS, "--gpus", "2", "--set", "rollout.dp_size=4"], "rollout.dp_size: 4 engines of TP 1 need 4 GPUs, not 2"),
        (["{node}", *GPUS, "--gpus", "2", "--set", "rollout.tp_size=4"], "rollout.tp_size: 1 engines of TP 4 need 4 GPUs, not 2"),
        (["{node}", *GPUS, "--set", "trainer.sequence_parallel=3"], "trainer.sequence_parallel = 3 does not divide trainer.num_ranks = 2"),
        (["{node}", *GPUS, "--set", "trainer.num_ranks=8", "--set", "trainer.sequence_parallel=8"], "8 ranks cannot share 4"),
        (["{node}", *GPUS, "--gpus", "2000"], "gpus: must be at most 1024 on one node, not 2000"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(node: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    places = {"node": str(node), "model": str(node.parent / "model")}
    assert main(["plan", *(argument.format(**places) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tasuki: error ") and told in said and said.count("\n") == 1


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


# --- several nodes

NODE = node_with(num_ranks=8)

PORTS = [
    part
    for setting in ("listen=0.0.0.0:50050", "security.cert=c", "security.key=k", "security.client_ca=a")
    for part in ("--set", setting)
]


def test_gradients_of_a_7b_model_on_two_nodes_cross_once_in_float32() -> None:
    ours, half = node_traffic(NODE, num_nodes=2)
    num_parameters = NODE.model.num_parameters
    # FSDP2 pads shards to equal size.
    assert ours.num_bytes == pytest.approx(4 * num_parameters, rel=1e-3)
    assert half.num_bytes == pytest.approx(2 * num_parameters, rel=1e-3)
    (row,) = traffic_table([ours], 3200)["node_traffic"]
    assert row["seconds"] == pytest.approx(ours.num_bytes * 8 / 3.2e12)


def test_more_nodes_approach_twice_the_gradients() -> None:
    one, many = (node_traffic(NODE, num_nodes=nodes)[0].num_bytes for nodes in (2, 64))
    assert many == pytest.approx(one * 2 * 63 / 64, rel=1e-6)


def test_a_model_that_one_node_cannot_hold_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "70b+", "--nodes", "4"]) == 1
    assert "more nodes do not make it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], 'listen = "unix" cannot be called from node 0, at node-0:29400: set it to HOST:PORT'),
        ([*PORTS, "--nodes", "3"], "Crosses nodes, HSDP: "),
        (["--set", "fleet.leader=127.0.0.1:29400"], "Crosses nodes, HSDP: "),
        (["--set", "fleet.num_nodes=0"], "fleet.num_nodes: "),
    ],
)
def test_a_fleet_is_planned_before_a_scheduler_places_it(
    node: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.write_text('state_dir = "state"\n[model]\npath = "model"\n[fleet]\nnum_nodes = 2\n')
    main(["plan", str(node), *arguments])
    told = capsys.readouterr()
    assert said in told.out + told.err
    node.write_text('state_dir = "state"\n[model]\npath = "model"\n[fleet]\ninterface = "eth0"\n')
    assert main(["plan", str(node)]) == USER_ERROR
    assert "nodes: [fleet] of CONFIG leaves num_nodes to a scheduler: give --nodes N" in capsys.readouterr().err


def test_measured_runs_name_the_fastest_split_and_what_others_cost(node: Path, capsys: pytest.CaptureFixture[str]):
    text = node.read_text().replace("num_ranks = 2", "num_ranks = 4").replace("dp_size = 1", "max_running_requests = 8")
    train = '[train]\ndataset = "d"\noutput_dir = "run"\nprompts_per_step = 4\ngroup_size = 2\nmax_new_tokens = 8\n'
    text += train + '[train.reward]\nfunction = "r:f"\n'
    node.write_text(text)
    runs: list[str] = []
    for tp, seconds in ((1, (9.0, 2.0, 1.0, 4.0)), (2, (9.0, 1.0))):
        (run := node.parent / f"tp{tp}").mkdir()
        (run / "run.toml").write_text(
            text.replace('"model"', f'"{node.parent}/model"').replace("[rollout]", f"[rollout]\ntp_size = {tp}")
        )
        rows = ({"step": n, "mean_num_tokens": 5.0, "seconds": {"generate": s}} for n, s in enumerate(seconds))
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs += ["--measured", str(run)]
    assert main(["plan", str(node), *GPUS, *runs]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "tokens/s by engines: 2 x TP 2 40 (0%), 4 x TP 1 20 (-50%), 1 x TP 4 not measured." in printed
    assert main(["plan", str(node), *GPUS, "--json", *runs[:2]]) == 0
    assert json.loads(capsys.readouterr().out)["generation"] == {"4 x TP 1": 20.0, "2 x TP 2": None, "1 x TP 4": None}
    assert main(["plan", str(node), *GPUS, "--set", "train.group_size=4", *runs]) == USER_ERROR
    assert "measured" in capsys.readouterr().err
    assert main(["plan", str(node), *GPUS, *runs[:2], *runs[:2]]) == USER_ERROR
    assert "measures 4 x TP 1, which an earlier run does" in capsys.readouterr().err
    said = {"": "no steps after its first", '"generate": 0.0': "no steps after", '"generate": -1.0': "cannot be: -40 tokens/s"}
    for seconds, problem in (said | {'"generate": NaN': "cannot be: nan tokens/s"}).items():
        line = f'{{"step": 1, "mean_num_tokens": 5.0, "seconds": {{{seconds}}}}}\n'
        (node.parent / "tp1" / "metrics.jsonl").write_text(2 * line)
        assert main(["plan", str(node), *GPUS, *runs[:2]]) == USER_ERROR
        assert problem in capsys.readouterr().err


def test_both_backends_are_compared_where_both_have_the_model(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(node), *GPUS, "--json"])
    table = json.loads(capsys.readouterr().out)
    backends = table["backends"]
    assert backends.keys() == {"fsdp", "megatron TP 1", "megatron TP 2"}
    parts = {device["device"]: device["needed_bytes"] for device in table["stages"][0]["devices"]}
    assert backends["fsdp"] == {"bytes": parts["cuda:0"], "fits": True}
    assert backends["megatron TP 1"]["bytes"] > backends["megatron TP 2"]["bytes"]
    main(["plan", str(node), *GPUS, "--set", "trainer.compile=blocks"])
    assert "megatron" not in capsys.readouterr().out


_ON_EXPERTS = {"lora": {"target_modules": ["q_proj", "v_proj"], "experts": True}}


@pytest.mark.parametrize(
    ("model", "trainer", "measured"),
    [
        ("qwen2.5-7b", {}, "dense 7B in full"),
        ("qwen3-30b-a3b", _ON_EXPERTS, "30B-A3B with LoRA on experts"),
    ],
)
def test_a_measured_speed_is_named_for_models_of_its_kind_alone(model: str, trainer: dict[str, Any], measured: str) -> None:
    (line,) = backend_lines(backend_plans(plan(node_with(model, num_ranks=2, trainer=trainer))))
    assert line.partition("Measured: ")[2].removeprefix("a ").startswith(measured)


@pytest.mark.parametrize(
    "trainer", [{"expert_parallel": True}, {"backend": "megatron", "megatron": {"tensor_parallel": 2, "expert_parallel": 4}}]
)
def test_backends_are_compared_with_experts_as_spread(trainer: dict[str, Any]) -> None:
    plans = backend_plans(plan(node_with("qwen3-30b-a3b", num_ranks=4, trainer=trainer)))
    assert {name: one.node.trainer.expert_ranks for name, one in plans.items()} == dict.fromkeys(
        ("fsdp", "megatron TP 1", "megatron TP 2", "megatron TP 4"), 4
    )


def test_a_backend_that_does_not_fit_is_listed_with_the_stage_that_is_too_large() -> None:
    (line,) = backend_lines(backend_plans(plan(node_with("qwen2.5-32b", num_ranks=2))))
    assert ", does not fit: a GPU needs" in line and " to spare, in " in line


def test_a_layout_of_any_number_of_ranks_is_compared() -> None:
    plans = backend_plans(
        plan(node_with(replace(MODELS["qwen3-30b-a3b"], num_kv_heads=3, num_heads=24, vocab_size=3000), num_ranks=3))
    )
    assert plans.keys() == {"fsdp", "megatron TP 1", "megatron TP 3"}
