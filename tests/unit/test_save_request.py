"""Requests to a run to save and end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.client import sft_loop
from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import newest_checkpoint
from tasuki.client.step import Step
from tasuki.config.train_schema import SftConfig
from tasuki.runs.training import SaveRequest
from tests.unit.loop_node import LoopClient, loop_of, train_config
from tests.unit.test_sft_loop import SAMPLES, SftClient


@pytest.fixture
def request_to_save() -> Iterator[SaveRequest]:
    before = signal.getsignal(signal.SIGUSR1)
    request = SaveRequest()
    request.install()
    yield request
    signal.signal(signal.SIGUSR1, before)


def _reporting(request: SaveRequest, steps: list[Step]):
    def report(step: Step) -> None:
        steps.append(step)
        request.end_if_met()
        if step.step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    return report


def test_the_step_after_the_signal_is_saved_and_the_run_ends(tmp_path: Path, request_to_save: SaveRequest) -> None:
    settings = train_config(tmp_path, num_steps=9, prompts_per_step=2, group_size=2, max_new_tokens=4)
    loop, steps = loop_of(LoopClient(), settings), list[Step]()
    loop.save_now = request_to_save.save_now
    with pytest.raises(KeyboardInterrupt):
        loop.run(_reporting(request_to_save, steps))
    assert [step.step for step in steps] == [0, 1, 2]
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found[1].step.step == 2


def test_a_supervised_run_too(tmp_path: Path, request_to_save: SaveRequest) -> None:
    settings = SftConfig(dataset=tmp_path, samples_per_step=2, output_dir=tmp_path)
    client, steps = SftClient(), list[Step]()
    loop = sft_loop.SftLoop(client, Dataset(SAMPLES, seed=1), [], settings, 9, request_to_save.save_now)
    with pytest.raises(KeyboardInterrupt):
        loop.run(_reporting(request_to_save, steps))
    assert [step.step for step in steps] == [0, 1, 2] and len(client.of("save")) == 1


def test_without_a_signal_nothing_is_saved(tmp_path: Path, request_to_save: SaveRequest) -> None:
    assert not request_to_save.save_now()
    request_to_save.end_if_met()
