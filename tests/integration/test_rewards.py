"""Rewards in real worker processes: any misbehaviour becomes one error that names the sample."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tasuki.client import worker_process
from tasuki.client.rewards import Completion, NamedReward, RewardPool
from tasuki.client.types import FinishReason, Sample
from tasuki.wire.errors import InvalidArgument, RewardFailed

REWARD = """
import os, signal, time
import numpy as np

class Odd(Exception):
    def __init__(self, one, two):  # cannot be rebuilt from its message alone
        super().__init__("odd")

class Mute(Exception):
    def __str__(self): raise KeyError

def reward(*, prompt, completion, **fields):
    match completion:
        case "right": return fields.get("score", 1.0)
        case "true": return True
        case "numpy": return np.float32(0.25)
        case "raises": raise Odd(1, 2)
        case "escapes": raise ValueError("a\\n\\x1b[31mb" + "x" * 5000)
        case "mute": raise Mute
        case "exits": raise SystemExit(3)
        case "hangs": time.sleep(60)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        case "dies": os.kill(os.getpid(), signal.SIGKILL)
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "text": return "1.0"
        case "none": return None
        case "huge": return 1e300
        case "long": return 10**400
        case "complex": return np.complex64(1j)
        case "numpy text": return np.str_("1.0")
        case "interrupts": raise KeyboardInterrupt
        case "pid": return os.getpid()
    return 0.0

def answered(completion, score):  # neither the prompt nor what else the row has
    return score

def whole(*, finish_reason, num_tokens):
    return num_tokens if finish_reason == "stop" else -num_tokens

def tokens(*, prompt_token_ids, completion_token_ids):
    assert type(prompt_token_ids) is type(completion_token_ids) is list
    return sum(prompt_token_ids) + 1000 * sum(completion_token_ids)

def names(completion, **fields):
    return sum(2 ** SEEN.index(name) for name in fields)

SEEN = ["prompt", "score", "finish_reason", "num_tokens", "prompt_token_ids", "completion_token_ids"]

def length(completion): return len(completion)

def shortest(prompt, completions, num_tokens, completion_token_ids, score=None):
    assert type(prompt) is str and all(type(one) is list for one in completion_token_ids)
    return [(own == min(num_tokens)) + (score or [0] * 9)[0] for own in num_tokens]

def ranks(prompts, completions, score, **fields):  # with TRL's arguments
    match completions[-1]:
        case "too few": return [1.0]
        case "number": return 1.0
        case "raises": raise Odd(1, 2)
        case "nan": return np.array([1.0] * (len(completions) - 1) + [np.nan])
    assert fields["finish_reason"] == ["stop"] * len(completions) if "finish_reason" in fields else True
    return tuple(10 * (own or 0) + prompts.index(prompt) for prompt, own in zip(prompts, score))

def unclear(completion, completions): return 0

def short(completion):
    if completion == "hangs": time.sleep(60)
    return -1e15 if completion == "vast" else float(len(completion) < 6)

constant = 3
"""
ROWS = [{"prompt": "a"}, {"prompt": "b", "score": 0.5}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "leaving.py").write_text("import sys; sys.exit(3)\n")
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RewardPool]:
    with RewardPool("my_rewards:reward", folders=[folder], timeout_s=2.0) as pool:
        yield pool


def test_rewards_come_in_order_with_the_fields_of_their_row(pool: RewardPool):
    scores = pool.score(ROWS, ["right", "wrong", "right", "true"], group_size=2)
    np.testing.assert_array_equal(scores.rewards, np.float32([1, 0, 0.5, 1]))
    assert scores.num_failed == 0
    np.testing.assert_array_equal(pool.score(ROWS, ["numpy", "right"]).rewards, np.float32([0.25, 0.5]))


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        ("raises", "raised Odd: odd"),
        ("escapes", r"raised ValueError: a\n\x1b[31mbxxx"),
        ("mute", "raised Mute: its text raised KeyError"),
        ("exits", "raised SystemExit: 3"),
        ("deaf", "gave no answer within 2 s"),
        ("dies", "ended its worker process"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("text", "returned str, not a number"),
        ("none", "returned NoneType, not a number"),
        ("huge", "returned 1e+300, which is beyond 1e+15"),
        ("long", "returned inf, which is not finite"),
        ("complex", "returned complex64, not a number"),
        ("numpy text", "returned str_, not a number"),
        ("interrupts", "raised KeyboardInterrupt"),
    ],
)
def test_a_failing_reward_names_sample_prompt_and_cause(pool: RewardPool, completion: str, cause: str):
    with pytest.raises(RewardFailed) as raised:
        pool.score(ROWS, ["right", "right", "right", completion], group_size=2)
    assert "sample 3 (prompt 1)" in raised.value.message
    assert cause in raised.value.message
    assert len(raised.value.message) < 1200
    assert (raised.value.metadata["sample"], raised.value.metadata["prompt"]) == ("3", "1")
    # The pool continues with the next batch.
    assert pool.score(ROWS, ["right", "right"]).rewards.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(("on_error", "instead", "mean"), [("zero", 0.0, 1 / 6), ("skip", np.nan, 0.5)])
def test_a_failure_may_count_as_zero_or_nothing_and_is_counted(folder: Path, on_error: str, instead: float, mean: float):
    with RewardPool("my_rewards:reward", folders=[folder], timeout_s=2.0, on_error=on_error, num_workers=2) as pool:
        scores = pool.score([ROWS[0]] * 6, ["right", "raises", "hangs", "dies", "nan", "wrong"])
        none = pool.score([ROWS[0]], ["raises"])
    np.testing.assert_array_equal(scores.rewards, np.float32([1, instead, instead, instead, instead, 0]))
    assert (scores.num_failed, scores.mean()) == (4, pytest.approx(mean))
    assert (none.num_failed, none.mean()) == (1, 0.0 if on_error == "zero" else None)


@pytest.mark.parametrize(
    ("replaced", "cause"),
    [
        ("json.dumps = lambda value: '[[NaN, \"\"]]'", ""),
        ("json.JSONEncoder.encode = None", ""),
        ("math.isfinite = lambda value: True; value = math.nan", "returned nan, which is not finite"),
        ("builtins.abs = lambda value: 0; value = 1e30", "returned 1e+30, which is beyond"),
        ("reward_worker.checked_reward = lambda value: (value, value, 1)", "made its worker answer [["),
        ("reward_worker.checked_reward = lambda value: (None, '')", "returned NoneType, not a number"),
    ],
)
def test_a_reward_that_replaces_what_its_worker_uses_fails_with_a_cause_if_at_all(tmp_path: Path, replaced: str, cause: str):
    source = "import builtins, json, math\nfrom tasuki.client import reward_worker\n"
    source += f"def reward(completion, value):\n    {replaced}\n    return value\n"
    (tmp_path / "replacing.py").write_text(source)
    with RewardPool("replacing:reward", folders=[tmp_path], on_error="skip") as pool:
        scores = pool.score([{"prompt": "a", "value": value} for value in (1.0, 0.5)], ["a", "b"])
    assert scores.num_failed == 2 * bool(cause) and all(cause in failure for failure in scores.failures)
    np.testing.assert_array_equal(scores.rewards, np.float32([np.nan] * 2 if cause else [1.0, 0.5]))


def test_a_worker_of_which_nothing_is_asked_is_not_late(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with RewardPool("my_rewards:reward", folders=[folder]) as pool, monkeypatch.context() as later:
        later.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0))
        assert pool._workers.told(pool._workers.all, timeout_s=0.0) == []


def _completion(finish_reason: FinishReason) -> Completion:
    log_probs = np.zeros(3, dtype=np.float32)
    sample = Sample(0, 0, np.array([5, 6, 7], dtype=np.int32), log_probs, finish_reason, policy_version=0)
    return Completion.of(sample, text="right", prompt_token_ids=[1, 2])


def test_a_function_gets_what_its_parameters_name(folder: Path):
    names = ("answered", "whole", "tokens", "names")
    with RewardPool([NamedReward(name, f"my_rewards:{name}") for name in names], folders=[folder]) as pool:
        completions = [_completion(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CUT)]
        by_name = pool.score([ROWS[1]], completions, group_size=3).by_name
    assert {name: values.tolist() for name, values in by_name.items()} == {
        "answered": [0.5] * 3,
        "whole": [3, -3, -3],
        "tokens": [18003] * 3,
        "names": [63] * 3,
    }


def _lengths(*lengths: int) -> list[Completion]:
    return [Completion("text", FinishReason.STOP, np.arange(length, dtype=np.int32), [1]) for length in lengths]


def test_a_function_of_completions_scores_a_group_or_with_prompts_the_batch(folder: Path):
    rows = [{"prompt": "a", "score": 2}, {"prompt": "b"}]
    both = [NamedReward("shortest", "my_rewards:shortest"), NamedReward("ranks", "my_rewards:ranks", weight=0.5)]
    with RewardPool(both, folders=[folder], num_workers=2) as pool:
        scores = pool.score(rows, _lengths(3, 4, 7, 7, 9, 8), group_size=3)
    assert scores.by_name["shortest"].tolist() == [3, 2, 2, 1, 0, 0]
    assert scores.by_name["ranks"].tolist() == [20, 20, 20, 3, 3, 3]
    assert scores.rewards.tolist() == [13, 12, 12, 2.5, 1.5, 1.5]
    with RewardPool("my_rewards:ranks", folders=[folder]) as pool:
        pool.check_rows([{"prompt": "a", "score": 1}], path="rows")
        with pytest.raises(InvalidArgument, match="takes `score`"):
            pool.check_rows(rows, path="rows")


def test_a_failing_call_fails_its_completions(folder: Path):
    rows = [{"prompt": "a", "score": 1}, {"prompt": "b", "score": 1}]
    failures = {
        "too few": ("0", "returned 1 rewards for 4 completions", [0] * 4),
        "number": ("0", "returned float, not a list of 4 rewards", [0] * 4),
        "raises": ("0", "raised Odd: odd", [0] * 4),
        "nan": ("3", "returned nan, which is not finite", [1, 1, 1, 0]),
    }
    with (
        RewardPool("my_rewards:ranks", folders=[folder]) as strict,
        RewardPool("my_rewards:ranks", folders=[folder], on_error="zero") as lenient,
    ):
        for last, (sample, cause, expected) in failures.items():
            with pytest.raises(RewardFailed) as raised:
                strict.score(rows, ["a", "b", "c", last], group_size=2)
            assert (raised.value.metadata["sample"], raised.value.metadata["cause"]) == (sample, cause)
            scores = lenient.score(rows, ["a", "b", "c", last], group_size=2)
            assert (scores.num_failed, scores.rewards.tolist()) == (expected.count(0), expected)


NAMED = [
    NamedReward("right", "my_rewards:reward", weight=2.0),
    NamedReward("short", "my_rewards:short", weight=-0.5),
    NamedReward("length", "my_rewards:length", weight=0.0),
]


def test_several_rewards_are_summed_by_weight_and_kept_by_name(folder: Path):
    with RewardPool(NAMED, folders=[folder]) as pool:
        scores = pool.score(ROWS, ["right", "wrong!", "right", "true"], group_size=2)
    assert scores.rewards.tolist() == [1.5, 0.0, 0.5, 1.5]
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {
        "right": [1.0, 0.0, 0.5, 1.0],
        "short": [1.0, 0.0, 1.0, 1.0],
        "length": [5.0, 6.0, 5.0, 4.0],
    }
    assert scores.num_failed == 0
    vast = [NamedReward("short", "my_rewards:short", weight=1.5)]
    with (
        RewardPool(vast, folders=[folder]) as pool,
        pytest.raises(RewardFailed, match=r"sum -1\.5e\+15 is beyond 1e\+15; lower"),
    ):
        pool.score(ROWS, ["wrong!", "vast"])


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([], "reward.name"),
        ([NamedReward("", "my_rewards:reward")], "reward.name"),
        ([NamedReward("a", "my_rewards:reward"), NamedReward("a", "my_rewards:short")], "reward.name"),
        ([NamedReward("a", "my_rewards:reward", weight=0.0)], "reward.weight"),
        ([NamedReward("a", "my_rewards:reward", weight=float("nan"))], "reward.weight"),
        ([NamedReward("a", max)], "put the function into a file"),  # as in a notebook
        (max, "put the function into a file"),
    ],
)
def test_rewards_that_cannot_be_told_apart_weighted_or_imported_are_refused(
    folder: Path, rewards: list[NamedReward], problem: str
):
    with pytest.raises(InvalidArgument, match=problem):
        RewardPool(rewards, folders=[folder])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("no_such_module:reward", "ModuleNotFoundError"),
        ("my_rewards:missing", "has no attribute 'missing'"),
        ("my_rewards:constant", "not a function"),
        ("my_rewards", "module:function"),
        ("my_rewards:unclear", "takes both `completion` and `completions`"),
        ("builtins:max", "no signature found"),
        ("broken:reward", "ZeroDivisionError"),
        ("leaving:reward", "SystemExit: 3"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_the_start(folder: Path, function: str, problem: str):
    with pytest.raises(InvalidArgument) as raised:
        RewardPool(function, folders=[folder])
    assert problem in raised.value.message
