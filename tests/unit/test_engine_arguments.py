"""[rollout.engine]: SGLang arguments that a configuration may set, refusals of others, and the plan's account of them."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.choices import Choices
from tasuki.config.engine_arguments import ALLOWED, uncounted_arguments
from tasuki.config.load import load_config, save_config
from tasuki.config.schema import NodeConfig
from tasuki.models.routes import RouteShape
from tasuki.wire.errors import InvalidArgument
from tests.refusal import refusing
from tests.unit.test_plan_cli import CONFIG

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
ROUTES = RouteShape(num_layers=1, experts_per_token=1, num_experts=2, sparse_layers=(0,))


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
        ("tp_size = 2", "tp_size", "use that"),
        ("mem_fraction_static = 0.5", "mem_fraction_static", "rollout.kv_ratio"),
        ("random_seed = 3", "random_seed", "is set by seed"),
        ('load_format = "auto"', "load_format", "no SGLang argument that tasuki takes"),
        ("chunked_prefil_size = 64", "chunked_prefil_size", "did you mean chunked_prefill_size"),
        ('chunked_prefill_size = "64"', "chunked_prefill_size", "give a whole number"),
        ("chunked_prefill_size = true", "chunked_prefill_size", "give a whole number"),
        ("decode_log_interval = 0", "decode_log_interval", "other than 0"),
        ("disable_overlap_schedule = 1", "disable_overlap_schedule", "true or false"),
        ("schedule_policy = 1", "schedule_policy", "give a text"),
        ("cuda_graph_bs_decode = 1", "cuda_graph_bs_decode", "give a list"),
        ('speculative_algorithm = "EAGLE"', "speculative_algorithm", "NGRAM"),
    ],
)
def test_other_arguments_are_refused_with_what_to_use(tmp_path: Path, engine: str, key: str, advice: str):
    with refusing(f"rollout.engine.{key}", match=advice):
        load(tmp_path, engine)


@needs_sglang
def test_every_name_is_one_of_sglangs():
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    text = Path(sglang.submodule_search_locations[0], "srt", "server_args.py").read_text()
    assert [name for name in ALLOWED if f"\n    {name}: A[" not in text] == []


def test_a_table_for_a_value_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument) as refused:
        load(tmp_path, "kv_cache_dtype = {a = 1}")
    assert refused.value.metadata["field"].startswith("rollout.engine.kv_cache_dtype")


def test_speculation_on_a_cpu_is_refused(tmp_path: Path):
    with refusing("rollout.engine.speculative_algorithm", match='needs device = "cuda"'):
        load(tmp_path, 'speculative_algorithm = "NGRAM"')
    file = tmp_path / "node.toml"
    assert load_config(file, overrides=["device=cuda"]).rollout.engine == {"speculative_algorithm": "NGRAM"}


def arguments_of(config: NodeConfig, stop_token_ids: tuple[int, ...] = (1,), **facts: Any) -> dict[str, object]:
    """Returns the arguments for SGLang's Engine."""
    pytest.importorskip("torch")
    from tasuki.rollout.arguments import engine_arguments
    from tasuki.rollout.model import ModelFacts

    read = {"path": "", "architecture": "", "vocab_size": 10, "context_length": 10, "is_seeded": False} | facts
    model = ModelFacts(stop_token_ids=stop_token_ids, **read)
    return engine_arguments(config, Choices(micro_batch_tokens=1, checkpointing="none"), model)


@needs_sglang
@pytest.mark.parametrize(("stop_token_ids", "eos"), [((), None), ((1, 3), [1, 3])])
def test_a_model_without_stop_tokens_has_none_in_the_engine(stop_token_ids: tuple[int, ...], eos: list[int] | None):
    config = NodeConfig.model_validate({"state_dir": "s", "device": "cpu", "model": {"path": "m"}})
    assert json.loads(str(arguments_of(config, stop_token_ids)["json_model_override_args"]))["eos_token_id"] == eos


@needs_sglang
def test_the_engine_reads_the_files_that_the_trainer_reads():
    tables = {"state_dir": "s", "device": "cpu", "model": {"path": "m"}, "trainer": {"lora": {"rank": 8}}}
    served = NodeConfig.model_validate({**tables, "rollout": {"lora": "adapter"}})
    for config, form in ((NodeConfig.model_validate(tables), "dummy"), (served, "safetensors")):
        assert arguments_of(config).items() >= {("load_format", form), ("model_config_parser", "hf")}


@needs_sglang
@pytest.mark.parametrize(
    ("device", "routes", "runner"), [("cuda", None, None), ("cuda", ROUTES, "triton"), ("cpu", None, "triton")]
)
def test_experts_of_gpt_oss_are_computed_by_a_kernel_that_reports_routes(
    device: str, routes: RouteShape | None, runner: str | None
):
    config = NodeConfig.model_validate({"state_dir": "s", "device": device, "model": {"path": "m"}})
    assert arguments_of(config, architecture="GptOssForCausalLM", routes=routes).get("moe_runner_backend") == runner


@needs_sglang
@pytest.mark.parametrize(
    ("rollout", "is_off"),
    [({}, False), ({"tp_size": 2}, True), ({"tp_size": 2, "engine": {"enable_flashinfer_allreduce_fusion": True}}, False)],
)
def test_all_reduces_are_fused_on_request(rollout: dict[str, object], is_off: bool):
    config = NodeConfig.model_validate({"state_dir": "s", "device": "cuda", "model": {"path": "m"}, "rollout": rollout})
    assert arguments_of(config).get("enforce_disable_flashinfer_allreduce_fusion", False) is is_off


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
    with refusing("rollout.engine.disable_overlap_schedule", match="is set to True on this device"):
        engine_of("cpu", disable_overlap_schedule=False)


def test_what_tasuki_sets_cannot_be_given_too():
    assert set(engine_of("cuda")) & set(ALLOWED) == set()


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
