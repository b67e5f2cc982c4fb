"""Public names of the client. A change here is a change for users and needs a line in CHANGELOG.md."""

import inspect
from pathlib import Path

import pytest

import tasuki.client.rl_loop
import tasuki.client.sft_loop
from tasuki.client import AsyncClient, Client

ROOT = Path(__file__).parents[2]
NAMES = {
    "Aggregation", "AsyncClient", "Changeover", "CispoLoss", "Client", "Correction", "Credentials", "Dataset", "DppoLoss", "FinishReason",
    "ForwardBackwardResult", "GspoLoss", "KlEstimator", "LossConfig", "NodeState", "OldPolicy", "OptimStepResult", "Phase",
    "PolicyGradientLoss", "PpoLoss", "RewardPool", "Role", "RolloutState", "Sample", "SamplingParams", "SapoLoss", "SaveResult", "SftLoss",
    "Stage", "StageEvent", "StageStatus", "TrainerState", "TrainingSample", "ValueLoss", "Watched", "read_jsonl",
}  # fmt: skip
VERBS = {
    "acquire", "begin_acquire", "begin_run", "changeovers", "close", "compute_log_probs", "compute_values", "discard_gradients",
    "export_model", "forward_backward", "forward_backward_custom", "generate", "generate_if_served", "generate_stream", "generate_until",
    "load", "optim_step", "rollout_state", "save", "state", "trainer_state", "watch", "with_old_log_probs",
}  # fmt: skip


def test_the_loop_that_users_copy_is_the_one_that_runs() -> None:
    assert Path(tasuki.client.rl_loop.__file__).resolve() == ROOT / "client/examples/rl_loop.py"
    assert Path(tasuki.client.sft_loop.__file__).resolve() == ROOT / "client/examples/sft_loop.py"


def test_client_exports_these_names() -> None:
    assert set(tasuki.client.__all__) == NAMES


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_client_has_these_verbs(client: type) -> None:
    assert {name for name, _ in inspect.getmembers(client, callable) if not name.startswith("_")} - {"submit"} == VERBS
