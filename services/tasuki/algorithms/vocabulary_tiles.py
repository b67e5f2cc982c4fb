"""How the logits of lm_head.py are cut into tiles: all places by part of the vocabulary. Without torch: the planner counts them, too."""

from __future__ import annotations

# Logits of a tile, in float32: 64 MiB on a CPU, 512 MiB on a GPU, where small products leave processors idle.
TILE_VALUES = {"cpu": 1 << 24, "cuda": 1 << 27}
ALIGNMENT = 128


def tile_width(num_places: int, *, hidden_size: int, vocab_size: int, device: str) -> int:
    """Tokens of the vocabulary in a tile; the last tile may have fewer. num_places: at least 1. device: "cpu" or "cuda"."""
    # A CPU computes with a float32 copy of a tile's weights: no more of them than of logits.
    num_tiles = -(-vocab_size * max(num_places, hidden_size) // TILE_VALUES[device])
    return min(-(-vocab_size // (num_tiles * ALIGNMENT)) * ALIGNMENT, vocab_size)


def most_logits(num_places: int, *, hidden_size: int, vocab_size: int, device: str) -> int:
    """Logits of a tile with that many places, at most; with fewer places it has no more."""
    values = TILE_VALUES[device] * num_places // max(num_places, hidden_size)
    return min(num_places * vocab_size, values + num_places * ALIGNMENT)
