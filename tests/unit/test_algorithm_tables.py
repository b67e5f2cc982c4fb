"""`train.algorithm` and `[train.loss]`: expansion of a name, precedence, and refusals by key."""

from __future__ import annotations

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
from tasuki.config.load import load_config
from tasuki.config.save import save_config
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import PRESETS, TrainConfig, expanded
from tasuki.wire.errors import InvalidArgument

MINIMAL = (
    'state_dir = "state"\n[model]\npath = "model"\n[train]\ndataset = "a"\noutput_dir = "b"\n[train.reward]\nfunction = "a:b"\n'
)
HELD_OUT = "train.eval_dataset=held-out.jsonl"
CRITIC = "trainer.critic.learning_rate=1e-5"
STEERED = ("train.advantages.kl_coef=0.1", "train.advantages.kl_target=6")


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
    ("overrides", "field", "problem"),
    [
        (["train.loss.clip_low=1.5"], "train.loss.clip_low", "is 1.5; must be a number from 0 to 1"),
        (["train.loss.old_policy=given"], "train.loss.old_policy", "unknown key; ppo has"),
        (["train.loss.clip=0.2"], "train.loss.clip", "unknown key; ppo has"),
        (["train.loss.correction.mask=1"], "train.loss.correction.mask", "unknown key; it has token_truncation"),
        (["train.loss.name=nope"], "train.loss.name", "give one of cispo, "),
        (["train.algorithm=grop"], "train.algorithm", "Input should be 'grpo'"),
        (["train.advantages.std=median"], "train.advantages.std", "Input should be"),
        (["train.advantages.kl_target=0.1"], "train.advantages.kl_target", "needs a kl_coef"),
        (["train.group_size=1"], "train.group_size", "teaches nothing"),
        (["train.group_size=1", "train.algorithm=rloo"], "train.group_size", 'estimator = "leave_one_out"'),
        (
            ["train.group_size=1", "train.algorithm=remax", "train.max_batches=2"],
            "train.max_batches",
            "a group of one never does",
        ),
        (
            ["train.overlong_tokens=100", "train.max_new_tokens=99"],
            "train.overlong_tokens",
            "is 100; must be from 1 to max_new_tokens = 99",
        ),
        (
            ["train.old_policy=current", "train.num_mini_batches=2"],
            "train.old_policy",
            '"current" is for one optimizer step a step, and there are 2',
        ),
        (["train.loss.name=sft"], "train.loss", "sft does not learn from rewards"),
        (["train.loss.name=value"], "train.loss", "value does not learn from rewards"),
        (["train.critic_warmup_steps=2"], "train.critic_warmup_steps", "needs a critic"),
        (["train.loss.clip_high=1e39"], "train.loss.clip_high", "must be a number from 0 to 1e+30"),
        (["train.temperature=1e-7"], "train.temperature", "greater than or equal to 0.00001"),
        (["train.eval.temperature=1e-9", "train.eval.num_samples=4"], "train.eval.temperature", "must be 0, which is greedy"),
        (
            ["train.algorithm=ppo", CRITIC, "train.critic_warmup_steps=9", "train.num_steps=9"],
            "train.critic_warmup_steps",
            "is 9 of num_steps = 9, so the policy would never train",
        ),
        (["train.stop_token_ids=[7, 2147483648]"], "train.stop_token_ids.1", "less than or equal to 2147483647"),
        (["train.top_k=2147483648"], "train.top_k", "less than or equal to 2147483647"),
        (
            [*STEERED, "train.prompts_per_step=10000", "train.group_size=5"],
            "train.advantages.kl_target",
            "is for steps of fewer than 50000 samples, and there are 50000",
        ),
        (["train.algorithm=ppo"], "train.advantages.estimator", "add a table [trainer.critic]"),
        ([CRITIC], "trainer.critic", "nothing trains it"),
        ([HELD_OUT, "train.eval.num_samples=4"], "train.eval", "temperature above 0"),
        (['train.num_steps="5"'], "train.num_steps", "give a number, without quotes (got '5')"),
        (["train.num_steps=true"], "train.num_steps", "give a number (got True)"),
        (['train.mask_truncated="true"'], "train.mask_truncated", "give true or false, without quotes"),
        (['train.stop_token_ids=["7"]'], "train.stop_token_ids", "give a number, without quotes"),
        (['train.loss.clip_low="0.2"'], "train.loss.clip_low", "is '0.2'; must be a number"),
        (['train.loss.correction.token_mask=["0.5", 2.0]'], "train.loss.correction.token_mask", "must be two bounds"),
        (["train.reward.weights.a=1"], "train.reward.weights", "has a, which names no function"),
        (["train.reward.function={}"], "train.reward.function", "names no function"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_file_is_read(
    tmp_path: Path, overrides: list[str], field: str, problem: str
) -> None:
    error = refused(tmp_path, *overrides)
    assert error.metadata["field"] == field
    assert problem in error.message


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
