"""Random shapes, and random boxes in them, for Hypothesis."""

from hypothesis import strategies as st

from tasuki.weights.manifest import Box


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, box: Box) -> Box:
    """Draws a box inside another."""
    starts = [draw(st.integers(0, size - 1)) for size in box.sizes]
    sizes = tuple(draw(st.integers(1, size - start)) for size, start in zip(box.sizes, starts, strict=True))
    return Box(tuple(offset + start for offset, start in zip(box.offsets, starts, strict=True)), sizes)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draws boxes that cover every element of a tensor of `shape` exactly once, in any order."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.sizes[dim] > 1:
            boxes += box.halves(dim, box.offsets[dim] + draw(st.integers(1, box.sizes[dim] - 1)))
        else:
            boxes.append(box)
    return draw(st.permutations(boxes))
