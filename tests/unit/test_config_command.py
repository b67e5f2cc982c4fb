"""`tasuki config`: keys, their origins, and settings without effect."""

from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tasuki.config.load import load_config, without_effect

TOML = """state_dir = "state"
[model]
path = "model"
[trainer]
betas = [0.9, 0.95]
[rollout.engine]
schedule_policy = "lof"
[train]
dataset = "a"
output_dir = "b"
[train.reward]
function = "a:b"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(TOML)
    return path


def test_every_key_has_its_origin_and_the_text_reads_back(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overrides = ["trainer.learning_rate=1e-5", "train.loss={name='gspo'}"]
    sets = [word for override in overrides for word in ("--set", override)]
    assert main(["config", str(file), *sets]) == 0
    printed = capsys.readouterr().out
    for line in (
        "betas = [0.9, 0.95]  # file",
        'schedule_policy = "lof"  # file',
        "learning_rate = 1e-05  # --set",
        'name = "gspo"  # --set',
        "num_ranks = 1  # default",
    ):
        assert line in printed.splitlines()
    (tmp_path / "printed.toml").write_text(printed)
    assert load_config(tmp_path / "printed.toml") == load_config(file, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["train.value_loss.clip=0.2"], ["train.value_loss.clip"]),
        (["train.algorithm=rloo", "train.advantages.std=population"], ["train.advantages.std"]),
        (["train.algorithm=rloo", "train.advantages.std=none"], []),
        (["train.advantages.lam=0.9"], ["train.advantages.lam"]),
        (["train.max_staleness=2"], ["train.max_staleness"]),
        (["train.loss.name=policy_gradient", "train.old_policy=given"], ["train.old_policy"]),
        (["train.old_policy=rollout", "train.loss.correction.sequence_truncation=2"], ["train.loss.correction.sequence_truncation"]),
        (["train.eval_every=5", "train.stop_at_eval_score=0.5"], ["train.eval_every", "train.stop_at_eval_score"]),
        (["train.eval_dataset=c", "train.eval.top_p=0.5"], ["train.eval.top_p"]),
    ],
)  # fmt: skip
def test_settings_without_effect_are_told_and_taken(file: Path, overrides: list[str], keys: list[str]) -> None:
    told = without_effect(load_config(file, overrides=overrides))
    assert [problem.partition(" = ")[0] for problem in told] == keys
