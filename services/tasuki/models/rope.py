"""Rotary embeddings that the trainer and the engine compute alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasuki.models.config_json import Config, unsupported

# Parameters of each type beside its name and its base. "dynamic" and "longrope" change with the longest sequence of a batch.
_PARAMETERS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}),
}
DEFAULT = frozenset({"default"})
SCALED = frozenset(_PARAMETERS)
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_NAMES = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def check_rope(config: Config, *, types: frozenset[str], is_partial: bool) -> None:
    """Raises UnsupportedModel for a type that is not in `types`, and for a parameter or a part of a head that is not accounted for."""
    if not is_partial and config.get("partial_rotary_factor") not in (None, 1):
        raise unsupported(config, "partial_rotary_factor", "the engine rotates whole heads of this family")
    for key in ("rope_scaling", "rope_parameters"):
        for rope in _each(config.get(key)):
            name = rope.get("rope_type", rope.get("type", "default"))
            if name not in types:
                known = ", ".join(sorted(types))
                raise unsupported(config, key, f"rope_type {name!r} is not supported for this family; there is {known}")
            if not is_partial and rope.get("partial_rotary_factor") not in (None, 1):
                raise unsupported(config, key, "partial_rotary_factor: the engine rotates whole heads of this family")
            unknown = {parameter for parameter, value in rope.items() if value} - _NAMES - _PARAMETERS[name]
            if unknown:
                raise unsupported(config, key, f"nobody has accounted for {', '.join(sorted(unknown))} of rope_type {name!r}")


def _each(value: Any) -> Iterator[Config]:
    """One table, or those of every kind of layer, as Gemma 3 has them."""
    if not isinstance(value, dict):
        return
    nested = [table for table in value.values() if isinstance(table, dict)]
    yield from nested or [value]
