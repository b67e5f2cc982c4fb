"""Our scheduler's parts around SGLang's classes: its start, its requests, and their ends."""

import json
from collections import deque
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import nn

from tasuki.config.schema import NodeConfig
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.sglang import scheduler
from tasuki.rollout.sglang.receivers import FirstSamples
from tasuki.rollout.sglang.scheduler import ReportingScheduler, ignore_generation_config, stop_at_the_last_token
from tasuki.wire.errors import InternalError
from tests.models import EOS, make_model, save_checkpoint


@pytest.mark.parametrize(
    "table", [{"temperature": 0.1, "top_k": 1, "eos_token_id": [9, 999]}, {"max_new_tokens": "x"}, {"pad_token_id": [1]}]
)
def test_no_key_of_it_reaches_the_engine(tmp_path: Path, table: dict[str, object]) -> None:
    folder = save_checkpoint(make_model("qwen2", seed=0), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(table))
    ignore_generation_config()
    override = json.dumps({"eos_token_id": [7]})
    config = ModelConfig(model_path=str(folder), model_override_args=override, sampling_defaults="model")
    assert (config.hf_eos_token_id, config.get_default_sampling_params()) == ({7}, {})


@pytest.mark.parametrize(
    ("tokens", "cut", "reason", "settings"),
    [
        ([5, 9], FINISH_ABORT(), "stop", {}),
        ([5, 9], FINISH_ABORT(), "abort", {"ignore_eos": True}),
        ([5, 6], FINISH_ABORT(), "abort", {}),
        ([5, 9], FINISH_ABORT("a bad request", status_code=400), "abort", {}),
        ([5, 9], None, "stop", {"max_new_tokens": 2}),
        ([5, 6], None, "length", {"max_new_tokens": 2}),
    ],
)
def test_a_completion_that_ends_as_it_is_cut_has_ended(
    tokens: list[int], cut: FINISH_ABORT | None, reason: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be continued after its end."""
    monkeypatch.setattr(Req, "update_finish_state", Req.update_finish_state)
    stop_at_the_last_token()
    sampling = SamplingParams(stop_token_ids=[9], **{"max_new_tokens": 8, **settings})
    sampling.normalize(None)
    request = Req("a", "", [1, 2], sampling, vocab_size=100, eos_token_ids={EOS})
    for token in tokens:
        request.output_ids.append(token)
        request.to_finish = cut if len(request.output_ids) == len(tokens) else None
        request.update_finish_state()
    assert request.finished_reason.to_json()["type"] == reason


class RefusingModel(nn.Module):
    """A model whose loader knows no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, _ in weights:
            raise KeyError(name)


def recorded_by(receiver: WeightReceiver, config: NodeConfig | None) -> tuple[str, list[str]]:
    """Returns the problem, and the parts of the start that were counted."""
    setup = SimpleNamespace(config=config, start_seconds={})
    scheduler: Any = SimpleNamespace(_setup=setup)
    return ReportingScheduler._record_ahead(scheduler, receiver, None), list(setup.start_seconds)


def config_of(folder: Path) -> NodeConfig:
    model = make_model("qwen2", seed=0)
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(folder)
    return NodeConfig.model_validate({"state_dir": folder, "model": {"path": folder}})


def test_what_prevents_a_recording_is_told(tmp_path: Path) -> None:
    problem, parts = recorded_by(WeightReceiver(RefusingModel()), config_of(tmp_path))
    assert (problem, parts) == ("KeyError: 'lm_head.weight'", [])


@pytest.mark.parametrize("has_node", [False, True])
def test_the_time_of_a_recording_is_a_part_of_the_start(tmp_path: Path, has_node: bool) -> None:
    class IgnoringModel(RefusingModel):
        def load_weights(self, weights: Any) -> None:
            assert len(list(weights)) == len(dict(make_model("qwen2", seed=0).named_parameters()))

    problem, parts = recorded_by(WeightReceiver(IgnoringModel()), config_of(tmp_path) if has_node else None)
    assert (problem, parts) == ("", ["plan"] if has_node else [])


def test_a_rank_without_its_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_built(*_: object, **__: object) -> NoReturn:
        raise InternalError("libtasuki_memory.so is not built: run `make native`")

    monkeypatch.setattr(scheduler, "rank_allocator", not_built)
    front, rank = Pipe()
    arguments: Any = SimpleNamespace(device="cpu")
    with pytest.raises(InternalError):
        scheduler.run_scheduler(arguments, arguments, 0, 0, rank)
    assert front.poll(0)
    assert front.recv() == {
        "status": "failed", "reason": "INTERNAL", "problem": "libtasuki_memory.so is not built: run `make native`",
    }  # fmt: skip


def batch(*ids: str) -> Any:
    return BatchTokenizedGenerateReqInput(batch=[SimpleNamespace(rid=rid) for rid in ids])


class Receiver:
    """Arrivals by iteration."""

    def __init__(self, *arrivals: list[Any]) -> None:
        self._arrivals = deque(arrivals)

    def recv_requests(self) -> list[Any]:
        return self._arrivals.popleft() if self._arrivals else []


def told(messages: list[Any]) -> list[Any]:
    return [
        [each.rid for each in message.batch] if isinstance(message, BatchTokenizedGenerateReqInput) else message
        for message in messages
    ]


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_the_first_sample_of_each_prompt_goes_ahead(num_iterations: int) -> None:
    arrived = batch("a-0-0.", "a-0-1.", "a-1-0.", "a-1-1.", "a-0-2.")
    samples = FirstSamples(Receiver([arrived]), num_iterations=num_iterations)
    assert told(samples.recv_requests()) == [["a-0-0.", "a-1-0."]]
    for _ in range(num_iterations - 1):
        assert samples.is_holding
        assert samples.recv_requests() == []
    assert told(samples.recv_requests()) == [["a-0-1.", "a-1-1.", "a-0-2."]]
    assert not samples.is_holding
    assert samples.recv_requests() == []


def test_a_command_overtakes_no_request() -> None:
    abort = AbortReq(rid="a-")
    samples = FirstSamples(Receiver([batch("a-0-0.", "a-0-1."), abort, batch("b-0-0.", "b-0-1.")]), num_iterations=2)
    assert told(samples.recv_requests()) == [["a-0-0."], ["a-0-1."], abort, ["b-0-0."]]
    assert samples.is_holding
    assert samples.recv_requests() == []
    assert told(samples.recv_requests()) == [["b-0-1."]]
