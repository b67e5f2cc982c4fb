"""Comparison of the bytes that ranks read back after a sync with those published, for tests without a service."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasuki.weights.imported_weights import Comparison, ImportedWeights
from tasuki.weights.plan import Slice


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """One slice of a checkpoint tensor, as an engine rank read it back after its copy."""

    rank: int
    name: str
    source: Slice
    checksum: int


def check_received(pieces: Sequence[ReceivedPiece], published: ImportedWeights) -> None:
    """Raises WeightsCorrupt, naming the first five tensors and the ranks, unless every tensor arrived whole and unchanged."""
    comparison = Comparison([(piece.rank, piece.name, piece.source) for piece in pieces], published)
    sums = np.array([piece.checksum for piece in pieces], dtype=np.uint64)
    if not comparison.agrees(sums):
        comparison.refuse(sums)
