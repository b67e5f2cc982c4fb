"""A rank records the plan of its first sync when it starts; what prevents that is told, and does not end the rank."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rollout.receive import WeightReceiver
from tasuki.rollout.sglang.scheduler import ReportingScheduler
from tests.models import make_model


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
    return NodeConfig(state_dir=folder, model=ModelConfig(path=folder))


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
