"""Turns of an episode: which tokens are trained, and under which prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasuki.client.episode import Episode
from tasuki.client.turns import Turn, Turns, as_json
from tasuki.client.types import FinishReason, Sample


def add(turns: Turns, parent: Turn | None, new: Sequence[int], drawn: Sequence[int], messages: Sequence[str] = ()) -> Turn:
    log_probs = -np.arange(1, len(drawn) + 1, dtype=np.float32)
    sample = Sample(0, 0, np.array(drawn, np.int32), log_probs, FinishReason.STOP, 3)
    turns.turns.append(Turn(parent, np.array(new, np.int32), sample, messages))
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
    assert turns.extended_by_chat([user]) is None
    first = add(turns, None, [1], [2], as_json([user, answer]))
    assert turns.extended_by_chat([user, answer, tool]) is first
    second = add(turns, first, [3], [4], as_json([user, answer, tool, answer]))
    assert turns.extended_by_chat([user, answer, tool, answer, user]) is second
    for rewritten in ([user, tool], [user, {**answer, "content": "B"}, tool], [answer, user], [user, answer]):
        assert turns.extended_by_chat(rewritten) is (first if rewritten[:2] == [user, answer] and len(rewritten) > 2 else None)


def test_turns_become_one_sample_whose_mask_counts_what_was_drawn():
    turns = Turns()
    second = add(turns, add(turns, None, [5, 6], [7]), [8, 9], [1, 2])
    (sample,) = turns.samples()
    assert np.asarray(sample.prompt_token_ids).tolist() == [5, 6]
    assert sample.token_ids.tolist() == [7, 8, 9, 1, 2]
    assert np.asarray(sample.loss_mask).tolist() == [1, 0, 0, 1, 1]
    assert sample.rollout_log_probs.tolist() == [-1, 0, 0, -1, -2]
    assert second.token_ids().tolist() == [5, 6, 7, 8, 9, 1, 2]


def test_ten_thousand_turns():
    turns, last = Turns(), None
    for number in range(10_000):
        last = add(turns, last, [number % 7], [1])
    (sample,) = turns.samples()
    assert len(sample.token_ids) == 19_999
