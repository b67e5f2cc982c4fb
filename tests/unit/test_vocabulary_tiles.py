"""Sizes of logit tiles."""

from hypothesis import given
from hypothesis import strategies as some

from tasuki.algorithms.vocabulary_tiles import ALIGNMENT, TILE_VALUES, most_logits, tile_width

SIZES = {
    "num_places": some.integers(1, 200_000),
    "hidden_size": some.integers(1, 16_384),
    "vocab_size": some.integers(1, 300_000),
    "device": some.sampled_from(sorted(TILE_VALUES)),
}


@given(**SIZES)
def test_a_tile_is_aligned_or_all_and_no_larger_than_told(num_places: int, hidden_size: int, vocab_size: int, device: str):
    width = tile_width(num_places, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
    assert width == vocab_size or (0 < width < vocab_size and width % ALIGNMENT == 0)
    most = most_logits(num_places, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
    assert num_places * width <= most <= TILE_VALUES[device] + num_places * ALIGNMENT


@given(more=some.integers(1, 1000), **SIZES)
def test_more_places_never_have_fewer_logits(more: int, num_places: int, hidden_size: int, vocab_size: int, device: str):
    few, many = (
        most_logits(count, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
        for count in (num_places, num_places + more)
    )
    assert few <= many
