"""A node whose processes are killed or stopped in the middle of a changeover recovers by itself. `make chaos` runs all cases."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.client import Client, Phase
from tasuki.wire.stages import Stage
from tests.chaos_node import ChaosNode, samples_of
from tests.conftest import RunningNode, assert_clean_audit
from tests.extent import IS_WHOLE
from tests.limits import limit_s

pytestmark = pytest.mark.timeout(300)
# A killed process is noticed at once, a stopped one after 12 s without a pulse: a twentieth of a stage's deadline.
NOTICED_S = {signal.SIGKILL: limit_s(3.0), signal.SIGSTOP: limit_s(18.0)}


@pytest.fixture
def chaos(node: RunningNode) -> Iterator[ChaosNode]:
    with Client(state_dir=node.state_dir) as client:
        yield ChaosNode(node, client)


@pytest.mark.parametrize(
    ("process", "stage", "number"),
    [
        ("coordinator", Stage.SYNC, signal.SIGKILL),
        ("trainer1", Stage.OFFLOAD, signal.SIGKILL),
        ("coordinator", Stage.PAUSE_WEIGHTS, signal.SIGSTOP),
        *([("scheduler0", Stage.PAUSE_KV, signal.SIGKILL)] if IS_WHOLE else []),
    ],
)
def test_phase_is_reached_and_nothing_trained_is_lost(chaos: ChaosNode, process: str, stage: Stage, number: signal.Signals):
    assert chaos.recovers(process, stage, number).detected_s < NOTICED_S[number]


def test_an_older_checkpoint_becomes_a_new_version_that_a_lost_trainer_recovers(chaos: ChaosNode, tmp_path: Path) -> None:
    client = chaos.client
    client.acquire(Phase.TRAIN)
    saved = chaos.step()
    samples, learned = samples_of(saved), chaos.learned
    client.save(tmp_path / "older")
    client.acquire(Phase.ROLLOUT)
    tokens = chaos.greedy()
    client.acquire(Phase.TRAIN)
    chaos.step()
    assert [one.tolist() for one in client.compute_log_probs(samples)] != learned
    assert client.load(tmp_path / "older") == saved + 2
    (pid,) = chaos.pids("trainer1")
    os.kill(pid, signal.SIGKILL)
    client.acquire(Phase.ROLLOUT)
    assert (client.state().policy_version, chaos.greedy()) == (saved + 2, tokens)
    client.acquire(Phase.TRAIN)
    assert [one.tolist() for one in client.compute_log_probs(samples)] == learned
    # Samples of versions before the load are still welcome.
    client.forward_backward(samples)
    assert client.optim_step(learning_rate=1e-3).version == saved + 3


def test_the_journal_of_all_that_is_clean_and_names_the_checkpoint_loaded(node: RunningNode) -> None:
    told = assert_clean_audit(node.state_dir)
    assert "logged_commands=0" not in told
    assert re.search(r"^loaded: version \d+ from /.*/older, first published in c\d+$", told, re.MULTILINE)
