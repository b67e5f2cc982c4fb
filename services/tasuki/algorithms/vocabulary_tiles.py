"""Splits the logits of lm_head.py into tiles: all positions by part of the vocabulary. Without torch, because the planner uses it."""

# Size of a tile's float32 logits: 64 MiB on a CPU; 512 MiB on a GPU, where small products leave processors idle.
TILE_VALUES = {"cpu": 1 << 24, "cuda": 1 << 27}
ALIGNMENT = 128


def tile_width(num_places: int, *, hidden_size: int, vocab_size: int, device: str) -> int:
    """Tokens of the vocabulary in a tile; the last tile may have fewer. num_places: at least 1. device: "cpu" or "cuda"."""
    # A CPU computes with a float32 copy of a tile's weights, which is bounded like the logits.
    num_tiles = -(-vocab_size * max(num_places, hidden_size) // TILE_VALUES[device])
    return min(-(-vocab_size // (num_tiles * ALIGNMENT)) * ALIGNMENT, vocab_size)


def most_logits(num_places: int, *, hidden_size: int, vocab_size: int, device: str) -> int:
    """Maximum logits of a tile with that many positions or fewer."""
    values = TILE_VALUES[device] * num_places // max(num_places, hidden_size)
    return min(num_places * vocab_size, values + num_places * ALIGNMENT)
