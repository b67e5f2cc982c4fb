"""[rollout.engine]: SGLang arguments that a configuration may set, refusals of others, and the plan's account of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasuki.algorithms.setting import SettingError
from tasuki.cli.__main__ import main
from tasuki.config import engine_arguments
from tasuki.config.engine_arguments import Argument, check_argument_values, uncounted_arguments
from tasuki.config.load import load_config
from tasuki.config.save import save_config
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import InvalidArgument
from tests.unit.test_plan_cli import CONFIG

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
NAMES = frozenset(engine_arguments._server_arguments())


def load(folder: Path, engine: str) -> NodeConfig:
    path = folder / "node.toml"
    path.write_text(f'state_dir = "state"\n[model]\npath = "model"\n[rollout.engine]\n{engine}\n')
    return load_config(path)


def test_arguments_of_every_kind_are_read_and_written(tmp_path: Path):
    text = 'kv_cache_dtype = "fp8_e4m3"\nchunked_prefill_size = 4096\nschedule_conservativeness = 0.5\n'
    config = load(tmp_path, text + "enable_torch_compile = true\ncuda_graph_bs_decode = [1, 2, 4]")
    assert config.rollout.engine == {
        "kv_cache_dtype": "fp8_e4m3",
        "chunked_prefill_size": 4096,
        "schedule_conservativeness": 0.5,
        "enable_torch_compile": True,
        "cuda_graph_bs_decode": [1, 2, 4],
    }
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml").rollout.engine == config.rollout.engine


@pytest.mark.parametrize(
    ("engine", "key", "advice"),
    [
        ("tp_size = 2", "rollout.engine.tp_size", "use that"),
        ("mem_fraction_static = 0.5", "rollout.engine.mem_fraction_static", "rollout.kv_ratio"),
        ('attention_backend = "fa3"', "rollout.engine.attention_backend", "rollout.attention_backend"),
        ('load_format = "auto"', "rollout.engine.load_format", "weights are exactly the trainer's"),
        ("enable_memory_saver = false", "rollout.engine.enable_memory_saver", "tasuki sets it"),
        ("enable_metrics = true", "rollout.engine.enable_metrics", "metrics.engine"),
        ("log_requests = true", "rollout.engine.log_requests", "in logs"),
        ("port = 30000", "rollout.engine.port", "rollout.listen"),
        ("pp_size = 2", "rollout.engine.pp_size", "rollout.tp_size"),
        ("kv_events_config = '{}'", "rollout.engine.kv_events_config", "listens at no address"),
        ('hicache_storage_backend = "dynamic"', "rollout.engine.hicache_storage_backend", "connects to none"),
        ('spec_trace_dir = "/tmp"', "rollout.engine.spec_trace_dir", "in logs"),
        ('speculative_token_map = "x"', "rollout.engine.speculative_token_map", "model's folder alone"),
        ("enable_profile_cuda_graph = true", "rollout.engine.enable_profile_cuda_graph", "only below state_dir"),
        ('model_impl = "transformers"', "rollout.engine.model_impl", "run code of the model's folder"),
        ("cpu_offload_gb = 1", "rollout.engine.cpu_offload_gb", "weights are exactly the trainer's"),
        # offload_mode: its processes would meet through files in /tmp that hold pickles.
        ('offload_mode = "sharded_gpu"', "rollout.engine.offload_mode", "weights are exactly the trainer's"),
        ("offload_group_size = 2", "rollout.engine.offload_group_size", "weights are exactly the trainer's"),
        ("allow_auto_truncate = true", "rollout.engine.allow_auto_truncate", "the whole prompt"),
        ("speculative_accept_threshold_single = 0.5", "rollout.engine.speculative_accept_threshold_single", "the policy's own"),
        ("detokenizer_worker_num = 2", "rollout.engine.detokenizer_worker_num", "tasuki sets it"),
        ('disaggregation_mode = "prefill"', "rollout.engine.disaggregation_mode", "rollout.tp_size"),
        ('speculative_algorithm = "EAGLE"', "rollout.engine.speculative_algorithm", "NGRAM"),
        ('speculative_draft_model_path = "x"', "rollout.engine.speculative_draft_model_path", "NGRAM"),
    ],
)
def test_an_argument_of_tasukis_own_is_refused_with_what_to_use(tmp_path: Path, engine: str, key: str, advice: str):
    with pytest.raises(InvalidArgument, match=advice) as refused:
        load(tmp_path, engine)
    assert refused.value.metadata["field"] == key


SAYS_A_PLACE = re.compile(
    r"addr|config|corpus|dir(_|$)|disk|dump|endpoint|export|extra|file|folder|host|http|input|ipc|location|mooncake|output|path|port|"
    r"remote|server|socket|storage|template|trace|url"
)
NO_PLACES = {
    "cuda_graph_config",
    "deepep_dispatcher_output_dtype",
    "disable_outlines_disk_cache",
    "enable_attn_tp_input_scattered",
    "enable_broadcast_mm_inputs_process",
    "enable_cache_report",
    "extra_metric_labels",
    "hf_chat_template_name",
    "load_balance_method",
    "mm_process_config",
    "model_config_parser",
    "skip_server_warmup",
    "speculative_ngram_external_corpus_max_tokens",
    "weight_loader_prefetch_checkpoints",
}
"""Switches, choices, tables and numbers whose names look like paths."""


@needs_sglang
def test_no_argument_names_an_address_or_a_place_to_read_or_write():
    """New SGLang versions may add arguments that open a port or write prompts to a file."""
    allowed = {name for name in NAMES if SAYS_A_PLACE.search(name) and accepts(name)}
    assert allowed <= NO_PLACES


def accepts(name: str) -> bool:
    try:
        engine_arguments.check_engine_arguments({name: "NGRAM"})
    except SettingError:
        return False
    return True


def test_a_table_for_a_value_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument) as refused:
        load(tmp_path, "kv_cache_dtype = {a = 1}")
    assert refused.value.metadata["field"].startswith("rollout.engine.kv_cache_dtype")


def test_speculation_on_a_cpu_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match='needs device = "cuda"') as refused:
        load(tmp_path, 'speculative_algorithm = "NGRAM"')
    assert refused.value.metadata["field"] == "rollout.engine.speculative_algorithm"
    file = tmp_path / "node.toml"
    assert load_config(file, overrides=["device=cuda"]).rollout.engine == {"speculative_algorithm": "NGRAM"}


@needs_sglang
@pytest.mark.parametrize("override", ["rollout.engine.bogus=1", "rollout.engine.page_size=true"])
def test_a_plan_of_arguments_that_sglang_refuses_is_refused(tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    load(tmp_path, "")
    assert main(["plan", str(tmp_path / "node.toml"), "--set", override]) == 2
    assert f"tasuki: error INVALID_ARGUMENT: {override.partition('=')[0]}: " in capsys.readouterr().err


@needs_sglang
def test_a_name_that_sglang_has_not_is_refused_with_the_nearest_one():
    with pytest.raises(InvalidArgument, match="did you mean chunked_prefill_size") as refused:
        check_argument_values({"chunked_prefil_size": 64})
    assert refused.value.metadata["field"] == "rollout.engine.chunked_prefil_size"


@needs_sglang
def test_a_value_that_sglang_would_stumble_over_is_refused():
    taken: dict[str, Argument] = {
        "chunked_prefill_size": 64, "cuda_graph_bs_decode": [1, 2], "schedule_policy": "lpm", "schedule_conservativeness": 1,
        "disable_overlap_schedule": True, "fp8_gemm_runner_backend": "anything", "deepep_mode": "auto",
    }  # fmt: skip
    check_argument_values(taken)
    for name, value, takes in (
        ("chunked_prefill_size", "64", r"Optional\[int\]"),
        ("chunked_prefill_size", True, r"Optional\[int\]"),
        ("cuda_graph_bs_decode", ["1"], r"Optional\[List\[int\]\]"),
        ("schedule_policy", "first", "'lpm', 'random'"),
        ("deepep_mode", "none", r"Literal\['auto'"),
        ("disable_overlap_schedule", 1, "bool"),
    ):
        with pytest.raises(InvalidArgument, match=f"is {re.escape(repr(value))}; SGLang takes .*{takes}") as refused:
            check_argument_values({name: value})
        assert refused.value.metadata["field"] == f"rollout.engine.{name}"
    # With 0 the scheduler ended at its first batch, after each restart.
    for name in ("decode_log_interval", "stream_interval", "speculative_num_draft_tokens", "speculative_ngram_max_bfs_breadth"):
        check_argument_values({name: 1})
        with pytest.raises(InvalidArgument, match="is 0; must be at least 1"):
            check_argument_values({name: 0})


@needs_sglang
def test_the_types_of_sglangs_arguments_take_their_defaults():
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    text = Path(sglang.submodule_search_locations[0], "srt", "server_args.py").read_text()
    (fields,) = (node.body for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs")
    defaults = {
        line.target.id: line.value.value
        for line in fields
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(line.value, ast.Constant)
    }
    given = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | str)}
    assert len(given) > 200
    check_argument_values(given)


def test_every_key_that_a_refusal_names_is_one():
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    for text in engine_arguments.KEYS.values():
        for key in re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+|^device$", text):
            table, _, name = key.rpartition(".")
            section = page.partition(f"## `[{table}]`" if table else "## Top of the file")[2].partition("\n## ")[0]
            assert f"| `{name}` |" in section, key


@needs_sglang
def test_every_name_in_the_lists_is_one_of_sglangs():
    lists = (engine_arguments.KEYS, engine_arguments._REFUSED, engine_arguments._WITHOUT_MEMORY, engine_arguments._AT_LEAST_ONE)
    assert {name for names in lists for name in names} - NAMES - PORT_NAMES == set()
    for prefix in engine_arguments._REFUSED_PREFIXES:
        assert any(name.startswith(prefix) for name in NAMES)


PORT_NAMES = {
    "detokenizer_ipc_name", "instance_id", "metrics_ipc_name", "rpc_ipc_name", "scheduler_input_ipc_name", "tokenizer_ipc_name",
    "tokenizer_worker_ipc_name",
}  # fmt: skip


def arguments_of(config: NodeConfig) -> dict[str, object]:
    """Returns the arguments for SGLang's Engine."""
    pytest.importorskip("torch")
    from tasuki.rollout.arguments import engine_arguments
    from tasuki.rollout.model import ModelFacts

    facts = ModelFacts(path="", architecture="", vocab_size=10, context_length=10, stop_token_ids=(1,), is_seeded=False)
    return engine_arguments(config, facts)


def engine_of(device: str, **engine: object) -> dict[str, object]:
    return arguments_of(
        NodeConfig.model_validate({"state_dir": "s", "device": device, "model": {"path": "m"}, "rollout": {"engine": engine}})
    )


@needs_sglang
def test_an_argument_reaches_the_engine_unless_the_device_sets_it():
    assert engine_of("cuda", disable_overlap_schedule=True, chunked_prefill_size=64).items() >= {
        ("disable_overlap_schedule", True),
        ("chunked_prefill_size", 64),
    }
    with pytest.raises(InvalidArgument, match="is set to True on this device") as refused:
        engine_of("cpu", disable_overlap_schedule=False)
    assert refused.value.metadata["field"] == "rollout.engine.disable_overlap_schedule"


def test_all_that_tasuki_sets_on_a_gpu_is_refused():
    ours = engine_of("cuda")
    known = {**engine_arguments.KEYS, **engine_arguments._REFUSED}
    assert set(ours) - set(known) == set()


@needs_sglang
@pytest.mark.parametrize(
    ("device", "rollout", "prompts_per_step", "running", "captured"),
    [
        ("cuda", {}, 64, 512, 512),
        ("cuda", {"dp_size": 2, "max_running_requests": 300}, 96, 300, 300),
        ("cuda", {}, 4, 256, None),
        ("cuda", {}, 999, 4096, 1024),
        ("cuda", {"engine": {"disable_cuda_graph": True}}, 64, 512, None),
        ("cpu", {}, 64, 256, None),
    ],
)
def test_all_samples_of_a_step_run_at_once_with_graphs(
    device: str, rollout: dict[str, object], prompts_per_step: int, running: int, captured: int | None
):
    config = NodeConfig.model_validate(
        {
            "state_dir": "s", "device": device, "model": {"path": "m"}, "rollout": rollout,
            "train": {
                "dataset": "d", "output_dir": "o", "reward": {"function": "a:b"}, "group_size": 8, "prompts_per_step": prompts_per_step,
            },
        }
    )  # fmt: skip
    arguments = arguments_of(config)
    assert (arguments["max_running_requests"], arguments.get("cuda_graph_max_bs_decode")) == (running, captured)


def test_a_plan_names_what_it_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    load(tmp_path, 'kv_cache_dtype = "fp8_e4m3"\nschedule_policy = "lof"')
    sizes = ["--gpu-gb", "80", "--host-gb", "100", "--set", 'device="cuda"']
    assert main(["plan", str(tmp_path / "node.toml"), *sizes]) == 0
    printed = capsys.readouterr().out
    assert "Not counted: rollout.engine.kv_cache_dtype." in printed and "schedule_policy" not in printed
    assert main(["plan", str(tmp_path / "node.toml"), *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_counted"] == ["rollout.engine.kv_cache_dtype"]
    assert uncounted_arguments({"schedule_policy": "lof"}) == []
    assert uncounted_arguments({"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 10**6}) == []


def test_min_p_is_refused_with_speculative_decoding():
    pytest.importorskip("torch")
    from tasuki.rollout.generate import check_request
    from tasuki.rollout.model import ModelFacts
    from tasuki.v1.rollout_pb2 import GenerateRequest

    model = ModelFacts(path="", architecture="", vocab_size=10, context_length=10, stop_token_ids=(1,), is_seeded=False)
    request = GenerateRequest(prompts=[{"token_ids": [5]}], num_samples=1, sampling_params={"min_p": 0.1})
    check_request(request, model)
    with pytest.raises(InvalidArgument, match="SGLang ignores it with speculative decoding"):
        check_request(request, replace(model, is_speculative=True))
