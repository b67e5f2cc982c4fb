"""`train.algorithm` and `[train.loss]`: expansion of a name, precedence, and refusals by key."""

from pathlib import Path
from typing import Any

import pytest

from tasuki.algorithms.loss_types import Aggregation, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.estimation import Estimator
from tasuki.config.load import load_config, save_config
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import PRESETS, TrainConfig, expanded
from tasuki.wire.errors import InvalidArgument

MINIMAL = (
    'state_dir = "state"\n[model]\npath = "model"\n[train]\ndataset = "a"\noutput_dir = "b"\n[train.reward]\nfunction = "a:b"\n'
)
HELD_OUT = "train.eval_dataset=held-out.jsonl"
CRITIC = "trainer.critic.learning_rate=1e-5"
STEERED = ("train.advantages.kl_coef=0.1", "train.advantages.kl_target=6", "train.prompts_per_step=10000", "train.group_size=5")


def config_of(folder: Path, *overrides: str) -> NodeConfig:
    path = folder / "node.toml"
    path.write_text(MINIMAL)
    return load_config(path, overrides=overrides)


def settings_of(folder: Path, *overrides: str) -> TrainConfig:
    train = config_of(folder, *overrides).train
    assert train is not None
    return train


def refused(folder: Path, *overrides: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        config_of(folder, *overrides)
    return raised.value


EXPANSIONS: dict[str, tuple[Estimator, str, Any, Aggregation]] = {
    "grpo": (Estimator.GROUP_MEAN, "sample", PpoLoss(), Aggregation.TOKEN_MEAN),
    "dr_grpo": (Estimator.GROUP_MEAN, "none", PpoLoss(), Aggregation.CONSTANT),
    "rloo": (Estimator.LEAVE_ONE_OUT, "sample", PpoLoss(), Aggregation.TOKEN_MEAN),
    "reinforce_pp": (Estimator.GLOBALLY_WHITENED, "sample", PpoLoss(), Aggregation.TOKEN_MEAN),
    "reinforce_pp_baseline": (Estimator.GROUP_BASELINE_WHITENED, "sample", PpoLoss(), Aggregation.TOKEN_MEAN),
    "remax": (Estimator.GREEDY_BASELINE, "sample", PolicyGradientLoss(), Aggregation.TOKEN_MEAN),
    "ppo": (Estimator.GAE, "sample", PpoLoss(), Aggregation.TOKEN_MEAN),
    "dapo": (Estimator.GROUP_MEAN, "sample", PpoLoss(clip_high=0.28), Aggregation.TOKEN_MEAN),
    "gspo": (Estimator.GROUP_MEAN, "sample", GspoLoss(), Aggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    "cispo": (Estimator.GROUP_MEAN, "sample", CispoLoss(), Aggregation.TOKEN_MEAN),
}


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_is_these_settings_of_the_loop(tmp_path: Path, name: str) -> None:
    settings = settings_of(tmp_path, f"train.algorithm={name}", *([CRITIC] if name == "ppo" else []))
    estimator, std, loss, aggregation = EXPANSIONS[name]
    assert (settings.advantages.estimator, settings.advantages.std) == (estimator, std)
    assert (settings.loss.loss, settings.loss.aggregation) == (loss, aggregation)
    assert settings.max_batches == (4 if name == "dapo" else 1)
    expected = ValueLoss(clip=0.2) if name == "ppo" else None
    critic = settings.critic_loss()
    assert (None if critic is None else critic.loss) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_an_expanded_table_is_expanded_already_also_after_saving(tmp_path: Path, name: str) -> None:
    once = expanded({"algorithm": name})
    assert expanded(once) == once
    config = config_of(tmp_path, f"train.algorithm={name}", *([CRITIC] if name == "ppo" else []))
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config


def test_what_the_file_sets_wins_and_the_rest_of_the_algorithm_stays(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "train.algorithm=dapo", "train.loss.clip_high=0.5", "train.max_batches=1")
    assert settings.loss.loss == PpoLoss(clip_low=0.2, clip_high=0.5)
    assert settings.max_batches == 1
    settings = settings_of(tmp_path, "train.algorithm=dr_grpo", "train.advantages.std=population")
    assert (settings.advantages.std, settings.loss.aggregation) == ("population", Aggregation.CONSTANT)


def test_settings_of_another_loss_are_not_inherited(tmp_path: Path) -> None:
    assert settings_of(tmp_path, "train.algorithm=dapo", "train.loss.name=gspo").loss.loss == GspoLoss()
    assert settings_of(tmp_path, "train.algorithm=gspo", "train.loss.name=ppo").loss.loss == PpoLoss()
    loss = settings_of(tmp_path, "train.algorithm=dapo", "train.loss.name=ppo").loss.loss
    assert loss == PpoLoss(clip_high=0.28)


def test_dr_grpo_divides_by_the_longest_completion(tmp_path: Path) -> None:
    def length(*overrides: str) -> int | None:
        return settings_of(tmp_path, "train.algorithm=dr_grpo", *overrides).loss.aggregation_length

    assert length() == 512
    assert length("train.max_new_tokens=100") == 100
    assert length("train.loss.aggregation=token_mean") is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], OldPolicy.CURRENT),
        (["train.num_mini_batches=2"], OldPolicy.GIVEN),
        (["train.num_epochs=2"], OldPolicy.GIVEN),
        (["train.num_epochs=2", "train.old_policy=rollout"], OldPolicy.ROLLOUT),
        (["train.num_epochs=2", "train.algorithm=remax"], OldPolicy.CURRENT),
    ],
)
def test_old_log_probs_are_computed_where_a_ratio_needs_them(tmp_path: Path, overrides: list[str], expected: OldPolicy) -> None:
    assert settings_of(tmp_path, *overrides).policy_loss().old_policy is expected


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("train.loss.clip_low", ["train.loss.clip_low=1.5"]),
        ("train.loss.old_policy", ["train.loss.old_policy=given"]),
        ("train.loss.clip", ["train.loss.clip=0.2"]),
        ("train.loss.correction.mask", ["train.loss.correction.mask=1"]),
        ("train.loss.name", ["train.loss.name=nope"]),
        ("train.algorithm", ["train.algorithm=grop"]),
        ("train.advantages.std", ["train.advantages.std=median"]),
        ("train.advantages.kl_target", ["train.advantages.kl_target=0.1"]),
        ("train.advantages.discount", ["train.advantages.discount=0.0"]),
        ("train.group_size", ["train.group_size=1"]),
        ("train.max_batches", ["train.group_size=1", "train.algorithm=remax", "train.max_batches=2"]),
        ("train.overlong_tokens", ["train.overlong_tokens=100", "train.max_new_tokens=99"]),
        ("train.old_policy", ["train.old_policy=current", "train.num_mini_batches=2"]),
        ("train.loss", ["train.loss.name=sft"]),
        ("train.temperature", ["train.temperature=1e-7"]),
        ("train.eval.temperature", ["train.eval.temperature=1e-9", "train.eval.num_samples=4"]),
        ("train.eval", [HELD_OUT, "train.eval.num_samples=4"]),
        ("train.critic_warmup_steps", ["train.critic_warmup_steps=2"]),
        ("train.critic_warmup_steps", ["train.algorithm=ppo", CRITIC, "train.critic_warmup_steps=9", "train.num_steps=9"]),
        ("train.stop_token_ids.1", ["train.stop_token_ids=[7, 2147483648]"]),
        ("train.stop.1", ['train.stop=["a", ""]']),
        ("train.top_k", ["train.top_k=2147483648"]),
        ("train.advantages.kl_target", STEERED),
        ("train.advantages.estimator", ["train.algorithm=ppo"]),
        ("trainer.critic", [CRITIC]),
        ("train.num_steps", ['train.num_steps="5"']),
        ("train.mask_truncated", ['train.mask_truncated="true"']),
        ("train.reward.weights", ["train.reward.weights.a=1"]),
        ("train.reward.function", ["train.reward.function={}"]),
    ],
)
def test_what_does_not_fit_is_refused_when_the_file_is_read(tmp_path: Path, field: str, overrides: list[str]) -> None:
    assert refused(tmp_path, *overrides).metadata["field"] == field


@pytest.mark.parametrize("estimator", Estimator)
def test_every_estimator_is_a_key_and_one_completion_a_prompt_is_refused_by_those_that_need_groups(
    tmp_path: Path, estimator: Estimator
) -> None:
    overrides = [f"train.advantages.estimator={estimator}", *([CRITIC] if estimator is Estimator.GAE else [])]
    assert settings_of(tmp_path, *overrides).advantages.estimator is estimator
    if estimator.needs_groups:
        assert "teaches nothing" in refused(tmp_path, *overrides, "train.group_size=1").message
    else:
        assert settings_of(tmp_path, *overrides, "train.group_size=1").group_size == 1
