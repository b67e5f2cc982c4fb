"""Losses that the caller computes: their gradients as weights, and what is refused."""

import sys
from typing import Any, cast

import numpy as np
import pytest
import torch

from tasuki.client import LossConfig
from tasuki.client.custom_loss import linearized
from tasuki.client.types import TrainingSample
from tests.refusal import refusing

NAN = float("nan")
SAMPLES = [TrainingSample([1], [2, 3]), TrainingSample([1], [4, 5, 6], loss_mask=[1, 0, 1])]
LOG_PROBS = [np.float32([-0.5, -1.0]), np.float32([-0.25, -2.0, -0.75])]
ROWS = [[2.0, -1.0], [0.5, 0.0, 0.25]]


def test_weights_are_the_gradient_that_autograd_finds() -> None:
    value, weighted = linearized(SAMPLES, LOG_PROBS, lambda _, log_probs: log_probs[0].exp().sum() * log_probs[1][2].square())
    assert value == pytest.approx((np.exp(-0.5) + np.exp(-1)) * 0.5625)
    assert weighted[0].advantages == pytest.approx(-np.exp(LOG_PROBS[0]) * 0.5625)
    assert weighted[1].advantages == pytest.approx([0, 0, -(np.exp(-0.5) + np.exp(-1)) * 2 * -0.75])
    with torch.no_grad():
        assert list(linearized(SAMPLES, LOG_PROBS, lambda _, rows: rows[0].sum())[1][1].advantages) == [0, 0, 0]


def test_a_loss_may_give_its_own_gradient_and_gets_arrays_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    value, weighted = linearized(SAMPLES, LOG_PROBS, lambda _, rows: (sum(row.sum() for row in rows), ROWS))
    assert value == -4.5
    assert [list(np.asarray(one.advantages)) for one in weighted] == [[-2.0, 1.0], [-0.5, 0.0, -0.25]]


def test_a_loss_that_reorders_the_callers_list_leaves_gradients_with_their_samples() -> None:
    samples = list(SAMPLES)

    def reordering(_: Any, rows: Any) -> Any:
        samples.reverse()
        return rows[0].sum()

    _, weighted = linearized(samples, LOG_PROBS, reordering)
    assert [list(one.completion_token_ids) for one in weighted] == [[2, 3], [4, 5, 6]]
    assert weighted[0].advantages == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "returned NoneType"),
        (1.5, "returned float"),
        ((NAN, ROWS), "returned nan"),
        ((1.0, ROWS[:1]), "1 gradients for 2 samples"),
        ((1.0, [[2.0], ROWS[1]]), r"shape \[1\] for samples\[0\]"),
        ((1.0, [ROWS[0], [0, 0, NAN]]), r"nan at token 2 of samples\[1\]"),
        ((1.0, [ROWS[0], [0, 0.5, 0]]), r"0.5 at token 1 of samples\[1\].* loss_mask"),
        (torch.ones(2, requires_grad=True), r"shape \[2\]"),
        (torch.ones(()), "requires_grad=False"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "real number"),
        ([torch.ones(2, requires_grad=True)] * 2, "returned list"),
        ("a text", "returned str"),
        ((1.0, 2.0), "returned tuple"),
        ((1.0, [ROWS[0], "abc"]), r"str as gradient for samples\[1\]"),
        ((1.0, [torch.ones(2, requires_grad=True), ROWS[1]]), r"Tensor as gradient for samples\[0\]"),
        ((1.0, [np.array([1j, 0j]), ROWS[1]]), r"ndarray as gradient for samples\[0\]"),
    ],
)
def test_what_is_no_loss_is_named(answer: Any, problem: str) -> None:
    with refusing("loss", match=problem):
        linearized(SAMPLES, LOG_PROBS, lambda *_: answer)


def test_a_loss_config_is_no_loss_in_python() -> None:
    with refusing("loss", match="LossConfig"):
        linearized(SAMPLES, LOG_PROBS, cast(Any, LossConfig()))
