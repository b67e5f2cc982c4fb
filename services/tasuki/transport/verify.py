"""Did the engine ranks together receive exactly what the trainer ranks published? Compares checksums; holds no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.transport.checksum import MODULUS, checksum
from tasuki.transport.imported_weights import ImportedWeights
from tasuki.transport.plan import Slice, count_uncovered, whole
from tasuki.wire.errors import WeightsCorrupt

_NAMED_TENSORS = 5


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """What one engine rank read back for one slice of a checkpoint tensor after its copy."""

    tp_rank: int
    name: str
    source: Slice
    checksum: int


def check_received(pieces: Sequence[ReceivedPiece], published: ImportedWeights) -> None:
    """Raises WeightsCorrupt, naming the first five tensors and the ranks, unless every tensor arrived whole and unchanged.

    A slice that several ranks hold must be equal on all of them; different slices of a tensor must not overlap, must cover it, and
    their sums must add up to what the publishers wrote in their headers.
    """
    by_name: defaultdict[str, list[ReceivedPiece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    problems: dict[str, str] = {}
    ranks: set[int] = set()
    for name, expected in published.checksums().items():
        problem = _problem(by_name[name], numel=_numel(published, name), expected=expected)
        if problem is not None:
            at_fault, where = _find_fault(by_name[name], published, name)
            ranks |= at_fault
            problems[name] = f"{problem}{where}"
    if problems:
        named = list(problems.items())[:_NAMED_TENSORS]
        raise WeightsCorrupt(
            f"{len(problems)} of {len(published.entries)} tensors did not arrive as published: "
            + "; ".join(f"{name}: {problem}" for name, problem in named),
            tensors=",".join(name for name, _ in named),
            rank=",".join(str(rank) for rank in sorted(ranks)),
        )


def _problem(pieces: Sequence[ReceivedPiece], *, numel: int, expected: int) -> str | None:
    if not pieces:
        return "no engine rank reads it"
    sums: dict[Slice, int] = {}
    for piece in pieces:
        if sums.setdefault(piece.source, piece.checksum) != piece.checksum:
            return "engine ranks that hold the same rows differ"
    missing, repeated = count_uncovered(numel, list(sums))
    if missing or repeated:
        return f"of {numel} elements {missing} were not received and {repeated} were received as parts of different slices"
    if sum(sums.values()) % MODULUS != expected:
        return "checksum differs"
    return None


def _find_fault(pieces: Sequence[ReceivedPiece], published: ImportedWeights, name: str) -> tuple[set[int], str]:
    """Looks at the published memory again, if it can: engine ranks at fault, and words that say where the difference is."""
    if not published.is_mapped:
        return set(), ""
    changed = published.changed_ranks(name)
    if changed:
        return set(), f" (memory of trainer rank {_listed(changed)} changed after it was published)"
    values = published.gathered(name).flatten()
    wrong = {
        piece.tp_rank
        for piece in pieces
        if checksum(values.as_strided(piece.source.shape, piece.source.strides, piece.source.offset), piece.source)
        != piece.checksum
    }
    return wrong, f" (engine rank {_listed(wrong)})" if wrong else ""


def _numel(published: ImportedWeights, name: str) -> int:
    return whole(published.entries[name][0].global_shape).numel


def _listed(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
