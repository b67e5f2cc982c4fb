"""Rotary embeddings supported by both trainer and engine."""

from collections.abc import Iterator

from tasuki.models.config_json import Config, is_number, size, unsupported
from tasuki.wire.errors import InvalidArgument

# Parameters of each type besides its name and base. "dynamic" and "longrope" depend on the longest sequence of a batch.
_PARAMETERS = {
    "default": frozenset[str](),
    "mrope": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "proportional": frozenset[str](),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}),
}
# Parameters without a default.
_REQUIRED = frozenset({"factor", "low_freq_factor", "high_freq_factor"})
DEFAULT = frozenset({"default"})
YARN = frozenset({"default", "yarn"})
MSCALES = frozenset({"mscale", "mscale_all_dim"})
MROPE = frozenset({"default", "mrope"})
"""transformers reads the second name as the first."""
SCALED = frozenset(_PARAMETERS) - {"mrope", "proportional"}
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_TABLES = ("rope_scaling", "rope_parameters")
_BASES = ("rope_theta", "rope_local_base_freq")
_LAYERS = frozenset({"full_attention", "sliding_attention"})
_NAMES = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def check_rope(
    config: Config,
    *,
    types: frozenset[str],
    is_partial: bool,
    further: frozenset[str] = frozenset(),
    notes: frozenset[str] = frozenset(),
) -> None:
    """Raises UnsupportedModel for a type not in `types`, for an unknown parameter, and for unsupported partial rotation; InvalidArgument
    for a value that is not a positive number. further: parameters of the family's scaled types. notes: those without effect.
    """
    for key in _BASES:
        if key in config:
            _check_positive(config[key], key)
    _check_part(config, "partial_rotary_factor", config, is_partial=is_partial)
    for key in _TABLES:
        for rope in _each(config, key):
            name = rope.get("rope_type", rope.get("type", "default"))
            if not isinstance(name, str) or name not in types:
                known = ", ".join(sorted(types))
                raise unsupported(config, key, f"rope_type {name!r} is not supported for this family; there is {known}")
            _check_part(config, key, rope, is_partial=is_partial)
            parameters = _PARAMETERS[name] | (further if name != "default" else frozenset())
            # Null counts too, since a default may be another value.
            unknown = rope.keys() - _NAMES - parameters - notes
            if unknown:
                raise unsupported(config, key, f"the effect of {', '.join(sorted(unknown))} of rope_type {name!r} is unknown")
            for parameter in sorted((parameters & _REQUIRED) - rope.keys()):
                raise InvalidArgument(key, f"rope_type {name!r} needs {parameter} in the model's config.json")
            if not isinstance(rope.get("truncate", True), bool):
                raise InvalidArgument(
                    key, f"truncate must be true or false in the model's config.json, not {rope['truncate']!r}"
                )
            for parameter in sorted(rope.keys() & (parameters | {"rope_theta"}) - {"truncate"}):
                _check_positive(rope[parameter], key, parameter)
            _check_scale(config, key, name, rope)


def _check_scale(config: Config, key: str, name: str, rope: Config) -> None:
    """Raises InvalidArgument for numbers that the engine reads in another way than transformers."""
    factor = rope.get("factor", 1.0)
    if factor < 1 or (name == "linear" and not isinstance(factor, float)):  # the engine takes a whole number for a list
        raise InvalidArgument(key, f"factor must be a decimal from 1.0 in the model's config.json, not {factor!r}")
    if name == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise InvalidArgument(key, "high_freq_factor must be above low_freq_factor in the model's config.json")
    if name == "yarn":
        longest = size(config, "max_position_embeddings")
        positions = factor * rope.get("original_max_position_embeddings", longest)
        if positions < longest:
            problem = f"must be at most {positions:g} in the model's config.json, the positions that yarn gives the engine"
            raise InvalidArgument("max_position_embeddings", problem)


def bases(config: Config) -> Iterator[float]:
    """All bases of rotary embeddings in config.json."""
    for table in (config, *(rope for key in _TABLES for rope in _each(config, key))):
        if "rope_theta" in table:
            yield table["rope_theta"]


def _check_part(config: Config, key: str, table: Config, *, is_partial: bool) -> None:
    """Checks the rotated part of each head. table: config.json itself, or a table within it."""
    part = table.get("partial_rotary_factor")
    if part is None and (table is config or "partial_rotary_factor" not in table):
        return
    name = "" if table is config else "partial_rotary_factor: "
    if not is_number(part) or not 0 < part <= 1:
        raise InvalidArgument(key, f"{name}must be above 0 and at most 1 in the model's config.json, not {part!r}")
    if not is_partial and part != 1:
        raise unsupported(config, key, f"{name}the engine rotates whole heads of this family")


def _check_positive(value: object, key: str, parameter: str = "") -> None:
    if not is_number(value) or value <= 0:
        name = f"{parameter} " if parameter else ""
        raise InvalidArgument(key, f"{name}must be a number above 0 in the model's config.json, not {value!r}")


def _each(config: Config, key: str) -> Iterator[Config]:
    """A single table, or one per kind of layer, as in Gemma 3. Raises InvalidArgument for another value."""
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidArgument(key, f"must be a table or null in the model's config.json, not {value!r}")
    tables = [table for layers, table in value.items() if layers in _LAYERS] or [value]
    if not all(isinstance(table, dict) for table in tables):
        raise InvalidArgument(key, f"must have a table for each kind of layer in the model's config.json, not {value!r}")
    yield from tables
