"""Episodes against a real node: tokens, log-probs, repeats, branches, and functions that fail in every way."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasuki.client import Client, FinishReason, Phase, SamplingParams
from tasuki.client.carry import CarriedGroup, Carry
from tasuki.client.dataset import Dataset, Row
from tasuki.client.episode import Episodes
from tasuki.client.episodes import EpisodePool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sample_dump import SampleDump
from tasuki.client.step import Step
from tasuki.config.train_schema import TrainConfig
from tasuki.runs.rl_training import check_reward_rows
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, RewardFailed
from tests.conftest import RunningNode
from tests.models import EOS, char_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
FUNCTIONS = """
import asyncio, os, signal, sys, time

async def three_turns(policy, prompt):
    chat = policy.chat([{"role": "system", "content": "be brief"}])
    for _ in range(3):
        await chat.say(prompt)
    return float(len(chat.messages))

async def rewrites(policy, prompt):
    chat = policy.chat()
    await chat.say(prompt)
    await chat.say("more")
    chat.messages[0] = {"role": "user", "content": "another"}
    await chat.say("again")
    first = await policy.generate(await policy.encode("xy"), max_new_tokens=2)
    await policy.generate([*first.context, 7], max_new_tokens=2)
    await asyncio.gather(*(policy.generate([9, 9]) for _ in range(2)))
    return 1.0

async def goes_on(policy, prompt):
    chat = policy.chat()
    while (await chat.say(prompt)).token_ids:
        pass
    given = [20] * 50
    return 2.0 * ((await policy.generate(given)).context == given)

async def rewards_turns(policy, prompt):
    for number in range(3):
        try:
            await asyncio.wait_for(policy.generate([40]), 0)  # drawn, but nobody hears its answer
        except TimeoutError:
            pass
        await policy.generate([20 + number])
        policy.reward(10.0 ** number if prompt == "rewarded" else 0.0)
    return 1000.0

async def scores_turns(policy, prompt):
    chat = policy.chat()
    for _ in range(3):
        reply = await chat.say(prompt)
        policy.reward(sum(reply.token_ids) % 7)
    return 0.0

async def fails(policy, prompt):
    await policy.chat().say("hello")
    match prompt:
        case "raises": raise RuntimeError("no\\nluck")
        case "text": return "1.0"
        case "sleeps": await asyncio.sleep(60)
        case "blocks": time.sleep(60)
        case "kills": os.kill(os.getpid(), signal.SIGKILL)
        case "exits": os._exit(3)
        case "leaves": await asyncio.gather(leaves())
        case "another loop": await asyncio.to_thread(lambda: asyncio.run(policy.generate([20])))
        case "forks": os.fork()
        case "nan": return float("nan")
        case "wrong": await policy.generate([])
    return 1.0

async def leaves():
    sys.exit(4)

async def leaves_tasks(policy, prompt):
    async def asks():
        while True:
            await policy.generate([40])
    async def breaks():
        await policy.generate([20])
        raise RuntimeError
    try:
        await asyncio.gather(asks(), breaks())
    except RuntimeError:
        return 1.0

async def never_ends(policy, prompt):
    while True:
        await policy.generate([20])

async def asks_wrongly(policy, prompt):
    for call in (
        lambda: policy.generate([20], max_new_tokens=-1), lambda: policy.generate([20], max_new_tokens="x"),
        lambda: policy.generate([2**40]), lambda: policy.generate([[5], [6]]), lambda: policy.generate("text"),
        lambda: policy.chat_completion("hello"), lambda: policy.chat_completion([{"role": "user"}]),
        lambda: policy.chat_completion([{"content": "a"}]), lambda: policy.encode(3),
    ):
        try:
            await call()
            return 0.0
        except (TypeError, ValueError):
            pass
    return 1.0

async def answers_twice(policy, prompt):
    tokens = 100 if prompt == "long" else 2
    first = await policy.generate([20, 21], max_new_tokens=tokens)
    await policy.generate([*first.context, 7, 8], max_new_tokens=tokens)
    return float(len(first.token_ids))

async def stops(policy, prompt):
    if not os.path.exists(prompt):
        open(prompt, "w").close()
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGSTOP)  # once the turn is asked for
    await policy.generate([20])
    return 1.0

async def careless(prompt): return 1.0
def blocking(policy): return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "agents.py").write_text(FUNCTIONS)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def client(node: RunningNode) -> Iterator[Client]:
    with Client(state_dir=node.state_dir) as client:
        client.acquire(Phase.ROLLOUT)
        yield client


def run(
    client: Client, folder: Path, function: str, rows: list[Row], *, num_samples: int = 2, stop: str = "", **settings: object
) -> Episodes:
    options, sampling = {"max_tokens": 96, **settings}, SamplingParams(max_new_tokens=6, stop=list(stop))
    tokenizer = ModelTokenizer(folder / "tokenizer")
    with EpisodePool(f"agents:{function}", tokenizer=tokenizer, folders=[folder], **options) as pool:
        pool.check_rows(rows, path="rows.jsonl")
        return pool.run(client, rows, sampling, num_samples=num_samples, number=5)


def test_an_answer_that_a_stop_text_ended_is_followed_by_what_the_template_writes_after_it(client: Client, folder: Path):
    stops = "abcdefghijklmnop"
    ran = run(client, folder, "three_turns", [{"prompt": "ab"}], num_samples=8, stop=stops)
    turns = [turn for episode in ran.episodes for turn in episode.turns.turns]
    ended = [turn for turn in turns if turn.sample.token_ids[-1] in char_tokenizer().convert_tokens_to_ids(list(stops))]
    assert {turn.sample.finish_reason for turn in ended[:1]} == {FinishReason.STOP}
    followed = [turn for turn in turns if any(turn.parent is one for one in ended)]
    assert {int(turn.prompt_token_ids[0]) for turn in followed} == {EOS}


def test_rewards_of_turns_are_those_of_the_turns_after_which_they_were_given(client: Client, folder: Path):
    ran = run(client, folder, "rewards_turns", [{"prompt": "rewarded"}, {"prompt": "not"}], discount=0.5)
    assert ran.scores.rewards.tolist() == [1111.0] * 2 + [1000.0] * 2
    for episode in ran.episodes:
        returns = {
            int(turn.prompt_token_ids[0]): value for turn, value in zip(episode.turns.turns, episode.turn_returns, strict=True)
        }
        assert returns[22] == (1100.0 if episode.row["prompt"] == "rewarded" else 1000.0)
        for sample in episode.training_samples():
            (number,) = set(np.asarray(sample.turns).tolist())
            assert episode.turns.turns[number].sample.token_ids.tolist() == list(sample.completion_token_ids)


def test_a_step_trains_each_turn_by_the_advantage_of_its_own_return(client: Client, folder: Path, tmp_path: Path):
    settings = TrainConfig.model_validate(
        {
            "dataset": "rows",
            "output_dir": str(tmp_path),
            "num_steps": 1,
            "prompts_per_step": 2,
            "group_size": 4,
            "max_new_tokens": 6,
            "episode": {"function": "agents:scores_turns", "discount": 0.5},
            "advantages": {"std": "none"},
        }
    )
    tokenizer, rows = ModelTokenizer(folder / "tokenizer"), Dataset[Row]([{"prompt": "ab"}, {"prompt": "cd"}])
    step = Step(0, policy_version=client.trainer_state().policy_version)
    pool = EpisodePool("agents:scores_turns", tokenizer=tokenizer, max_tokens=96, folders=[folder], discount=0.5)
    with pool, SampleDump(tmp_path / "samples") as dump:
        RlLoop(client, rows, [], tokenizer, pool, settings, dump=dump).learn(step)
    client.acquire(Phase.ROLLOUT)
    assert (step.num_policy_steps, client.trainer_state().policy_version) == (1, (step.policy_version or 0) + 1)
    assert step.metrics["log_prob_gap_max"] < 0.1
    drawn = [json.loads(line) for line in (tmp_path / "samples" / "step-000000.jsonl").read_text().splitlines()]
    assert len(drawn) == 8
    for group in (drawn[:4], drawn[4:]):
        returns_GT: list[list[float]] = []
        for one in group:
            turns = np.split(one["token_ids"], np.flatnonzero(np.diff(one["loss_mask"])) + 1)[::2]
            first, second, third = (sum(turn.tolist()) % 7 for turn in turns)
            returns_GT.append([first + second / 2 + third / 4, second + third / 2, third])
        for one, advantages_T in zip(group, returns_GT - np.mean(returns_GT, axis=0), strict=True):
            runs = np.split(one["advantages"], np.flatnonzero(np.diff(one["loss_mask"])) + 1)[::2]
            assert [set(np.round(run, 4)) for run in runs] == [{value} for value in np.round(advantages_T, 4)]


def test_turns_are_one_sequence_whose_log_probs_the_trainer_has_too(client: Client, folder: Path):
    ran = run(client, folder, "three_turns", [{"prompt": "ab"}, {"prompt": "cd"}])
    tokenizer = ModelTokenizer(folder / "tokenizer")
    samples = [sample for episode in ran.episodes for sample in episode.training_samples()]
    assert len(samples) == 4
    assert ran.scores.rewards.tolist() == [7.0] * 4
    for episode, sample in zip(ran.episodes, samples, strict=True):
        mask = np.asarray(sample.loss_mask)
        assert mask.sum() == sum(len(turn.sample.token_ids) for turn in episode.turns.turns)
        start = tokenizer.encode_prompt(
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": episode.row["prompt"]}]
        )
        assert np.asarray(sample.prompt_token_ids).tolist() == start
    scored = client.compute_log_probs(samples)
    client.acquire(Phase.ROLLOUT)
    for sample, row in zip(samples, scored, strict=True):
        drawn = np.asarray(sample.loss_mask) > 0
        assert np.abs(row - np.asarray(sample.rollout_log_probs))[drawn].max() < 0.1  # both in bfloat16
    again = run(client, folder, "three_turns", [{"prompt": "ab"}, {"prompt": "cd"}])
    first, second = ([one.sample().token_ids.tolist() for one in each.episodes] for each in (ran, again))
    # A prefix that is cached rounds otherwise: at the border of two tokens' probabilities, the neighbor may be drawn.
    steps = [next((abs(a - b) for a, b in zip(*pair, strict=False) if a != b), 0) for pair in zip(first, second, strict=True)]
    assert max(steps) <= 1 and sum(steps) <= 1
    assert len({tuple(token_ids) for token_ids in first}) == 4


def test_a_rewritten_history_begins_a_branch(client: Client, folder: Path):
    ran = run(client, folder, "rewrites", [{"prompt": "ab"}], num_samples=1)
    (episode,) = ran.episodes
    assert not episode.failure
    lengths = [len(turn.path()) for turn in episode.turns.turns]
    assert lengths == [1, 2, 1, 1, 2, 1, 1]
    assert len(episode.training_samples()) == 5
    assert ran.figures() == {"episode/turns": 7.0, "episode/branches": 5.0, "episode/truncated": 0.0}


def test_an_episode_without_room_or_turns_ends_truncated(client: Client, folder: Path):
    for settings, most in (({"max_turns": 3}, 3), ({"max_tokens": 40}, 40)):
        ran = run(client, folder, "goes_on", [{"prompt": "ab"}], **settings)
        assert ran.scores.rewards.tolist() == [2.0, 2.0]
        assert ran.figures()["episode/truncated"] == 1.0
        for episode in ran.episodes:
            assert len(episode.turns.turns) <= most
            assert len(episode.turns.turns[-1].token_ids()) <= settings.get("max_tokens", 96)
            assert episode.sample().finish_reason == "LENGTH"


def test_functions_that_fail_leave_the_others_alone(client: Client, folder: Path):
    told: dict[str, str] = {}
    for ways in (
        ["fine", "leaves", "another loop", "raises", "text", "sleeps", "blocks", "nan", "wrong", "late"],
        ["fine", "kills", "exits", "forks", "late"],
    ):
        rows: list[Row] = [{"prompt": way} for way in ways]
        ran = run(client, folder, "fails", rows, num_samples=1, timeout_s=2.0, on_error="skip", num_workers=2)
        told |= {way: one.failure for way, one in zip(ways, ran.episodes, strict=True)}
        assert [told.pop(way) for way in ("fine", "late")] == ["", ""]
        assert ran.scores.num_failed == np.isnan(ran.scores.rewards).sum()
    assert told.pop("forks") == ""
    assert told["raises"] == "raised RuntimeError: no\\nluck"
    assert told["leaves"] == "raised SystemExit: 4"
    assert "asked for in another event loop" in told["another loop"]
    assert told["text"] == "returned str, not a number"
    assert "2 s of its own time" in told["sleeps"]
    assert "blocked its worker" in told["blocks"]
    assert "ended its worker process" in told["kills"]
    assert "ended its worker process" in told["exits"]
    assert "not finite" in told["nan"]
    assert "give at least one token" in told["wrong"]
    with pytest.raises(RewardFailed, match=r"agents:fails failed for sample 1 \(prompt 1\): raised RuntimeError"):
        run(client, folder, "fails", [{"prompt": "fine"}, {"prompt": "raises"}], num_samples=1)


def test_episodes_of_a_worker_that_is_stopped_while_it_waits_for_the_policy_begin_again(
    client: Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasuki.client.episodes._GRACE_S", 0.5)
    ran = run(client, folder, "stops", [{"prompt": str(tmp_path / "stopped")}])
    assert (ran.scores.rewards.tolist(), sum(one.num_runs for one in ran.episodes) > 2) == ([1.0, 1.0], True)


def test_a_run_of_episodes_can_be_interrupted(client: Client, folder: Path):
    # A shell that starts the tests in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    killer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        run(client, folder, "fails", [{"prompt": "sleeps"}] * 4)
    killer.join()
    signal.signal(signal.SIGINT, before)


def test_functions_that_are_no_episodes_are_refused(client: Client, folder: Path):
    for function, problem in (
        ("careless", "does not take `policy`"),
        ("blocking", "is not `async def`"),
        ("missing", "no attribute"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            run(client, folder, function, [])
    for function, rewards_turns in (("rewards_turns", True), ("three_turns", False)):
        with EpisodePool(f"agents:{function}", tokenizer=None, max_tokens=0, folders=[folder]) as pool:
            assert pool.rewards_turns is rewards_turns
            train = TrainConfig.model_validate(
                {"dataset": "rows", "output_dir": "out", "episode": {"function": "agents:a"}, "algorithm": "reinforce_pp"}
            )
            with pytest.raises(InvalidArgument, match="policy.reward needs") if rewards_turns else nullcontext():
                check_reward_rows(pool, train, rows=[], eval_rows=[])
    with pytest.raises(InvalidArgument, match=r"rows.jsonl: row 1 has only question"):
        run(client, folder, "three_turns", [{"question": "a"}])


def test_tasks_that_an_episode_leaves_behind_take_no_turn_of_another(client: Client, folder: Path):
    rows: list[Row] = [{"prompt": "a"}, {"prompt": "b"}]
    tokenizer = ModelTokenizer(folder / "tokenizer")
    with EpisodePool("agents:leaves_tasks", tokenizer=tokenizer, max_tokens=96, folders=[folder]) as pool:
        for number in range(2):
            ran = pool.run(client, rows, SamplingParams(max_new_tokens=2), num_samples=2, number=number)
            assert ran.scores.rewards.tolist() == [1.0] * 4
            assert all(turn.prompt_token_ids.tolist() in ([20], [40]) for one in ran.episodes for turn in one.turns.turns)
            assert all([turn.prompt_token_ids.tolist() for turn in one.turns.turns].count([20]) == 1 for one in ran.episodes)


def test_wrong_arguments_and_endless_loops_fail_their_episode_alone(client: Client, folder: Path):
    ran = run(client, folder, "asks_wrongly", [{"prompt": "ab"}])
    assert ran.scores.rewards.tolist() == [1.0, 1.0], [one.failure for one in ran.episodes]
    ran = run(client, folder, "never_ends", [{"prompt": "ab"}], max_turns=3, on_error="zero")
    assert ran.scores.rewards.tolist() == [0.0, 0.0]
    assert all("has had its 3 turns" in one.failure for one in ran.episodes)


def test_episodes_outlive_a_changeover_and_go_on_from_their_tokens(client: Client, folder: Path):
    prompts, sampling = ["long", "short", "long"], SamplingParams(max_new_tokens=100, ignore_eos=True)
    tokenizer = ModelTokenizer(folder / "tokenizer")
    with ExitStack() as pools:

        def take(num_groups: int) -> list[CarriedGroup]:
            return carry.take_episodes(client, pool, sampling, num_groups=num_groups, on_progress=lambda *_: None)

        for _ in range(20):  # on a busy machine the short ones may end after the long ones' last token
            groups = [CarriedGroup.begin_episodes(number, {"prompt": one}, group_size=2) for number, one in enumerate(prompts)]
            pool = pools.enter_context(
                EpisodePool("agents:answers_twice", tokenizer=tokenizer, max_tokens=220, folders=[folder])
            )
            carry = Carry(groups)
            client.acquire(Phase.ROLLOUT)
            (short,) = take(1)
            waiting, again = carry.groups
            before = [episode.drawn() for episode in waiting.episodes]
            if short.id == 1 and all(sum(len(one.token_ids) for one in drawn) < 200 for drawn in before):
                break
        assert [episode.reward for episode in short.episodes] == [2.0, 2.0]
        assert sum(one["episodes"].count(None) for one in carry.records()) == 4, "these begin again if the client dies"
        client.forward_backward([replace(one, advantages=1.0) for each in short.episodes for one in each.training_samples()])
        client.optim_step()
        again.begin_again()
        client.acquire(Phase.ROLLOUT)
        version = client.trainer_state().policy_version
        ran = pool.run(client, [{"prompt": "short"}], sampling, num_samples=2, number=1)
        assert ran.scores.rewards.tolist() == [2.0, 2.0], "others may run between"
        assert take(2) == [waiting, again]
    for group in (waiting, again):
        assert CarriedGroup.of(group.as_json()).as_json() == group.as_json()
        for episode in group.episodes:
            (sample,) = episode.training_samples()
            assert (episode.reward, np.sum(sample.loss_mask), len(sample.completion_token_ids)) == (100.0, 200, 202)
            assert sample.policy_version == version
    for episode, drawn in zip(waiting.episodes, before, strict=True):
        (sample,) = episode.training_samples()
        is_drawn = np.asarray(sample.loss_mask, bool)
        drawn_of = sample.completion_token_ids, sample.rollout_log_probs
        tokens, log_probs = (np.asarray(each)[is_drawn].tolist() for each in drawn_of)
        length = sum(len(one.token_ids) for one in drawn)
        assert length and tokens[:length] == [token for one in drawn for token in one.token_ids]
        assert log_probs[:length] == [value for one in drawn for value in one.rollout_log_probs]
        (old, first), (new, second) = [(span.num_tokens, span.policy_version) for span in sample.version_spans]
        assert (first, second, old + new, is_drawn[:old].sum()) == (version - 1, version, 202, length)
    assert all(not sample.version_spans for episode in again.episodes for sample in episode.training_samples())
    client.forward_backward([replace(one, advantages=1.0) for each in waiting.episodes for one in each.training_samples()])
    client.discard_gradients()
    client.acquire(Phase.ROLLOUT)
