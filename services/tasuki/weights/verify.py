"""Verifies that the engine ranks together received exactly what the trainer ranks published. Compares checksums; holds no weights."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tasuki.weights.checksum import checksum
from tasuki.weights.imported_weights import ImportedWeights
from tasuki.weights.plan import Slice, count_uncovered, whole
from tasuki.wire.errors import WeightsCorrupt

_NAMED_TENSORS = 5
HeldSlice = tuple[str, Slice]
"""Name of a checkpoint tensor, and an engine rank's slice of it."""


class Comparison:
    """Compares engine ranks' checksums with the published ones; built once per set of slices and used in every sync.

    Ranks that hold the same slice must agree. Different slices of a tensor must not overlap and must cover it, and their sums must add up
    to the sums in the publishers' headers.
    """

    def __init__(self, held: Sequence[tuple[int, str, Slice]], published: ImportedWeights) -> None:
        """held: rank, tensor and slice of each sum."""
        self._held, self._published = list(held), published
        place_of = {name: place for place, name in enumerate(published.entries)}
        first_of: dict[HeldSlice, int] = {}
        for place, (_, name, source) in enumerate(self._held):
            first_of.setdefault((name, source), place)
        self._first_holders = np.array([first_of[name, source] for _, name, source in self._held], dtype=np.intp)
        self._parts = np.array(list(first_of.values()), dtype=np.intp)
        self._tensor_of_part = np.array([place_of[name] for name, _ in first_of], dtype=np.intp)
        slices: defaultdict[str, list[Slice]] = defaultdict(list)
        for name, source in first_of:
            slices[name].append(source)
        # Defects of the slices whatever they hold.
        self._gaps = {name: "no engine rank reads it" for name in published.entries if not slices[name]}
        for name, of_tensor in slices.items():
            numel = whole(published.entries[name][0].global_shape).numel
            missing, repeated = count_uncovered(numel, of_tensor)
            if of_tensor and (missing or repeated):
                text = (
                    f"of {numel} elements {missing} were not received and {repeated} were received as parts of different slices"
                )
                self._gaps[name] = text

    def agrees(self, sums: np.ndarray) -> bool:
        """sums: uint64, in the order of `held`."""
        return not (self._gaps or self._differing(sums).any() or self._wrong(sums).any())

    def refuse(self, sums: np.ndarray) -> None:
        """Raises WeightsCorrupt for sums that do not agree."""
        problems = {
            self._held[place][1]: "engine ranks that hold the same slice differ"
            for place in self._differing(sums).nonzero()[0].tolist()
        }
        problems = self._gaps | problems
        names = list(self._published.entries)
        for place in self._wrong(sums).nonzero()[0].tolist():
            problems.setdefault(names[place], "checksum differs")
        named = [name for name in names if name in problems]
        ranks: set[int] = set()
        for name in named:
            at_fault, where = self._find_fault(name, sums)
            ranks |= at_fault
            problems[name] += where
        raise WeightsCorrupt(
            f"{len(named)} of {len(names)} tensors did not arrive as published: "
            + "; ".join(f"{name}: {problems[name]}" for name in named[:_NAMED_TENSORS]),
            tensors=",".join(named[:_NAMED_TENSORS]),
            rank=",".join(str(rank) for rank in sorted(ranks)),
        )

    def _differing(self, sums: np.ndarray) -> np.ndarray:
        """Mask of sums that differ from the first rank with the same slice."""
        return sums != sums[self._first_holders]

    def _wrong(self, sums: np.ndarray) -> np.ndarray:
        """Mask of tensors whose sums do not add up; uint64 wraps as the checksum requires."""
        totals = np.zeros(len(self._published.entries), dtype=np.uint64)
        np.add.at(totals, self._tensor_of_part, sums[self._parts])
        return totals != self._published.checksums()

    def _find_fault(self, name: str, sums: np.ndarray) -> tuple[set[int], str]:
        """Reads the published memory again, if possible: returns the engine ranks at fault, and where the difference is."""
        if not self._published.is_mapped:
            return set(), ""
        changed = self._published.changed_ranks(name)
        if changed:
            return set(), f" (memory of trainer rank {_listed(changed)} changed after it was published)"
        values = self._published.gathered(name).flatten()
        wrong = {
            rank
            for (rank, held, source), value in zip(self._held, sums.tolist(), strict=True)
            if held == name and checksum(values.as_strided(source.shape, source.strides, source.offset), source) != value
        }
        return wrong, f" (engine rank {_listed(wrong)})" if wrong else ""


def _listed(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
