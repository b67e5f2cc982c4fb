"""Account of the bytes that a copy plan writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.weights.plan import Constant, CopyPlan, FallbackWrite, Piece, Slice, check_coverage, count_uncovered, whole
from tasuki.wire.errors import WeightsCorrupt
from tests.extent import examples


def covered(*writes: Slice, numel: int = 24) -> CopyPlan:
    return CopyPlan(tuple(Piece("t", write, "p", write) for write in writes), (), (), ())


def test_pieces_constants_and_fallbacks_add_up_to_a_whole_parameter() -> None:
    plan = CopyPlan(
        (Piece("t", whole((3, 4)), "p", whole((3, 4))),),
        (Constant("p", whole((1, 4), offset=12), 0.0),),
        ("f",),
        (FallbackWrite("p", Slice(16, (2, 4), (4, 1))),),
    )
    check_coverage(plan, {"p": 24})


@pytest.mark.parametrize(
    ("writes", "missing", "repeated"),
    [
        ((whole((5, 4)),), 4, 0),
        ((whole((5, 4)), Slice(16, (2, 4), (4, 1))), 0, 4),
        ((Slice(0, (6, 2), (4, 1)),), 12, 0),
        ((), 24, 0),
    ],
)
def test_what_is_missing_or_repeated_is_counted_and_named(writes: tuple[Slice, ...], missing: int, repeated: int) -> None:
    with pytest.raises(
        WeightsCorrupt, match=f"p: of 24 elements {missing} are not written and {repeated} are written"
    ) as caught:
        check_coverage(covered(*writes), {"p": 24})
    assert caught.value.metadata["tensors"] == "p"


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 7), st.integers(1, 8)), max_size=4))
def test_counts_agree_with_counting_element_by_element(boxes: list[tuple[int, int, int, int]]) -> None:
    counts = torch.zeros(6, 8, dtype=torch.int64)
    slices = []
    for row, rows, column, columns in boxes:
        box = counts[row : row + rows, column : column + columns]
        box += 1
        slices.append(Slice(box.storage_offset(), tuple(box.shape), box.stride()))
    assert count_uncovered(48, slices) == (int((counts == 0).sum()), int((counts > 1).sum()))


def test_large_weights_are_counted_on_a_small_mask() -> None:
    rows = 150_000
    halves = [Slice(rank * 4096, (rows, 4096), (8192, 1)) for rank in range(2)]
    assert count_uncovered(rows * 8192, halves) == (0, 0)


def test_a_slice_beyond_the_end_counts_as_wrong_everywhere() -> None:
    assert count_uncovered(24, [whole((25,))]) == (24, 24)
