"""Turns of an episode: which tokens are trained, and under which prefix."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasuki.client.episode import Episode
from tasuki.client.turns import ChatDigest, Turn, Turns
from tasuki.client.types import FinishReason, Sample, VersionSpan


def add(turns: Turns, parent: Turn | None, new: Sequence[int], drawn: Sequence[int], chats: Sequence[bytes] = ()) -> Turn:
    log_probs = -np.arange(1, len(drawn) + 1, dtype=np.float32)
    sample = Sample(0, 0, np.array(drawn, np.int32), log_probs, FinishReason.STOP, 3)
    turns.add(Turn(parent, np.array(new, np.int32), sample), chats=chats)
    return turns.turns[-1]


_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(calls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), _TOKENS, _TOKENS), min_size=1, max_size=12))
def test_each_drawn_token_is_trained_once_under_the_prefix_it_was_drawn_from(
    calls: list[tuple[int, int, list[int], list[int]]],
):
    turns = Turns()
    drawn_under: list[tuple[tuple[int, ...], int]] = []
    for choice, cut, new, drawn in calls:
        # A history that may be whole, shortened or another turn's.
        history = turns.turns[choice % len(turns.turns)].token_ids().tolist() if turns.turns else []
        prompt = np.array([*history[: len(history) - cut if cut < len(history) else 0], *new], np.int32)
        parent = turns.extended_by_tokens(prompt)
        before = [] if parent is None else parent.token_ids().tolist()
        assert prompt[: len(before)].tolist() == before
        add(turns, parent, prompt[len(before) :].tolist(), drawn)
        whole = [*prompt.tolist(), *drawn]
        drawn_under += [(tuple(whole[: len(prompt) + place]), token) for place, token in enumerate(drawn)]
    trained: list[tuple[tuple[int, ...], int]] = []
    for sample in Episode(0, {}, turns).training_samples():
        whole = [*np.asarray(sample.prompt_token_ids).tolist(), *np.asarray(sample.completion_token_ids).tolist()]
        start = len(sample.prompt_token_ids)
        trained += [(tuple(whole[: start + place]), whole[start + place]) for place in np.flatnonzero(sample.loss_mask)]
        assert not np.any(np.asarray(sample.rollout_log_probs)[np.asarray(sample.loss_mask) == 0] > 0)
    assert sorted(trained) == sorted(drawn_under)


def test_a_chat_extends_the_turn_whose_messages_it_begins_with():
    turns = Turns()
    user, answer, tool = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c"},
    )

    def extended(*messages: dict[str, Any], variant: str = "") -> tuple[Turn, int] | None:
        return turns.extended_by_chat(ChatDigest(variant).read(messages))

    assert extended(user) is None
    first = add(turns, None, [1], [2], ChatDigest().read([user, answer])[-1:])
    assert extended(user, answer, tool) == (first, 1)
    assert extended(user, {**answer, "content": " b\n"}, tool) == (first, 1)
    assert extended(user, answer, tool, variant="other tools") is None
    called, returned = (
        {**answer, "tool_calls": [{"id": name, "function": {"name": "f", "arguments": given}}]}
        for name, given in (("a", {"x": 1.0, "y": [100.0], "z": 2**53 + 1}), ("b", {"x": 1, "y": [1e2], "z": 2**53}))
    )
    turn = add(turns, None, [1], [6], ChatDigest().read([user, called])[-1:])
    assert extended(user, returned, tool) == (turn, 1), "JavaScript writes numbers in another form"
    second = add(turns, first, [3], [4], ChatDigest().read([user, answer, tool, answer])[-1:])
    assert extended(user, answer, tool, answer, user) == (second, 3)
    again = add(turns, None, [1], [5], ChatDigest().read([user, answer])[-1:])
    assert extended(user, answer, user) == (again, 1)
    for rewritten in (
        [user, tool],
        [user, {**answer, "content": "B"}, tool],
        [answer, user],
        [user, answer],
        [user, answer, tool],
    ):
        assert extended(*rewritten) == ((again, 1) if rewritten == [user, answer, tool] else None)


def test_turns_become_one_sample_whose_mask_counts_what_was_drawn():
    turns = Turns()
    second = add(turns, add(turns, None, [5, 6], [7]), [8, 9], [1, 2])
    (sample,) = turns.samples()
    assert np.asarray(sample.prompt_token_ids).tolist() == [5, 6]
    assert sample.token_ids.tolist() == [7, 8, 9, 1, 2]
    assert np.asarray(sample.loss_mask).tolist() == [1, 0, 0, 1, 1]
    assert sample.rollout_log_probs.tolist() == [-1, 0, 0, -1, -2]
    assert second.token_ids().tolist() == [5, 6, 7, 8, 9, 1, 2]


def test_a_sample_over_changeovers_says_which_version_drew_each_token():
    turns = Turns()
    first = add(turns, None, [5, 6], [7])
    log_probs = np.zeros(3, np.float32)
    spans = [VersionSpan(num_tokens=1, policy_version=3), VersionSpan(num_tokens=2, policy_version=4)]
    cut = Sample(0, 0, np.array([1, 2, 3], np.int32), log_probs, FinishReason.STOP, 4, version_spans=spans)
    turns.add(Turn(first, np.array([8, 9], np.int32), cut))
    (sample,) = turns.samples()
    assert [(one.num_tokens, one.policy_version) for one in sample.version_spans] == [(4, 3), (2, 4)]
    assert sample.policy_version == 4


def test_ten_thousand_turns():
    turns, last, chat = Turns(), None, ChatDigest()
    digests: list[bytes] = []
    for number in range(10_000):
        digests += chat.read([{"role": "user", "content": str(number)}, {"role": "assistant", "content": "a"}])
        last = add(turns, last, [number % 7], [1], digests[-1:])
    (sample,) = turns.samples()
    assert len(sample.token_ids) == 19_999
    assert last is not None
    assert turns.extended_by_tokens(np.array([*last.token_ids(), 5], np.int32)) is last
    assert turns.extended_by_chat([*digests, b""]) == (last, 19_999)
