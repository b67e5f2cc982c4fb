"""Loads a NodeConfig from TOML and `--set a.b=c`, and writes it as TOML. Every error names the key and what to do."""

import argparse
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tasuki.algorithms.setting import SettingError
from tasuki.config.checks import SettingsConflict
from tasuki.config.paths import config_path
from tasuki.config.schema import NodeConfig
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_regular

MAX_CONFIG_BYTES = 4_000_000
_SHOWN_CHARACTERS = 200
_DTYPES = (("trainer", "compute_dtype"), ("rollout", "dtype"))
SLOW_BFLOAT16 = "this CPU has no bf16 instructions, so bfloat16 takes 2 to 20 times as long as float32"
_HUB_MODEL = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_HUB_DATASET = re.compile(rf"{_HUB_MODEL.pattern}(:[\w.-]*){{0,2}}")
_DATA_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
_TABLE = """give a table in TOML, such as {a = 1, "b.*" = 2}"""
_WANTED = {
    "path_type": "give a path in quotes",
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
    "dict_type": _TABLE,
    "tuple_type": "give a list",
    "list_type": "give a list",
    "int_type": "give a whole number, without quotes",
    "float_type": "give a number, without quotes",
    "bool_type": "give true or false, without quotes",
}
"""Advice by pydantic's problem type, where its message names Python's types."""


def config_argument(service: str) -> Path:
    """The file that the command line of a service's process names."""
    parser = argparse.ArgumentParser(prog=f"tasuki.{service}")
    parser.add_argument("--config", type=Path, required=True)
    return parser.parse_args().config


def load_config(path: Path, *, overrides: Sequence[str] = ()) -> NodeConfig:
    """Loads the configuration in `path` and applies overrides such as "trainer.num_ranks=4".

    Relative paths are relative to the file's folder, or, in overrides, to the working directory.
    Raises PathNotFound if there is no file, PathPermissionDenied if it cannot be read, and otherwise InvalidArgument naming the key.
    """
    return config_of(_read(path, overrides))


def config_of(table: dict[str, Any], *, overrides: Sequence[str] = ()) -> NodeConfig:
    """The configuration of TOML's tables, with absolute paths, and overrides. Raises InvalidArgument naming the key."""
    for override in overrides:
        _apply(table, override)
    _anchor_paths(table, Path.cwd())
    try:
        return _for_this_cpu(NodeConfig.model_validate(table))
    except ValidationError as error:
        for replaced, instead in known_names("earlier_versions").items():
            if value_at(table, replaced) is not None:
                raise InvalidArgument(replaced, instead) from error
        # An unknown key may be why another is missing.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        conflict = first.get("ctx", {}).get("error")
        if isinstance(conflict, SettingsConflict):
            raise InvalidArgument(conflict.field, str(conflict)) from error
        key = ".".join(str(part) for part in first["loc"]) or "config"
        if first["type"] == "extra_forbidden" and isinstance(first["input"], Mapping):  # a table, such as verl's `algorithm`
            below = (f"{key}.{one}" for one, _ in leaves(first["input"]))
            key = next((one for one in below if one.rpartition(".")[2].lower() in known_names("other_libraries")), key)
        problem = conflict.problem if isinstance(conflict, SettingError) else _explain(first)
        if isinstance(conflict, SettingError):
            key = f"{key}.{conflict.field}"
        own = known_names("other_libraries").get(key.rpartition(".")[2].lower())
        if own is not None and problem.startswith("unknown key"):
            problem = f"unknown key; tasuki's name is {own}"
        raise InvalidArgument(key, problem) from error


@cache
def known_names(table: str) -> dict[str, str]:
    """What to write instead, by unknown key. table: "other_libraries" or "earlier_versions" of unknown_keys.toml."""
    names: Mapping[str, str] = _toml(Path(__file__).with_name("unknown_keys.toml"))[table]
    return {name: instead for instead, given in names.items() for name in given.split()}


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 by instructions of its own (AVX512-BF16, AMX, Arm's BF16), not slower than float32."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())


def slow_dtypes(config: NodeConfig) -> list[str]:
    """Keys that ask a CPU without bf16 instructions for bfloat16."""
    if config.device == "cuda" or has_bf16():
        return []
    return [f"{table}.{key}" for table, key in _DTYPES if getattr(getattr(config, table), key) == "bfloat16"]


def _for_this_cpu(config: NodeConfig) -> NodeConfig:
    """Dtypes that are slow on this CPU, unless given, become float32. They stay unset: a running node's may differ."""
    for key in slow_dtypes(config):
        table, _, name = key.partition(".")
        if name not in (settings := getattr(config, table)).model_fields_set:
            settings = settings.model_copy(update={name: "float32"})
            settings.model_fields_set.remove(name)
            config = config.model_copy(update={table: settings})
    return config


def changed(config: NodeConfig, values: Mapping[str, object]) -> NodeConfig:
    """The configuration with other values of keys, such as "trainer.num_ranks". Raises as config_of."""
    table = config.model_dump(exclude_none=True)
    for key, value in values.items():
        put(table, key, value)
    return config_of(table)


def value_at(at: NodeConfig | Mapping[str, object], key: str) -> object:
    """The value of a key; None without one."""
    found: object = at
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def origins(path: Path, *, overrides: Sequence[str] = ()) -> Callable[[str], str]:
    """Origin of each key of the configuration: "default", "file" or "--set"."""
    given = {key for key, _ in leaves(_read(path, ()))}
    changed = [override.partition("=")[0].strip() for override in overrides]

    def origin(key: str) -> str:
        if any(f"{key}.".startswith(f"{one}.") for one in changed):
            return "--set"
        return "file" if key in given else "default"

    return origin


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of tables in tables; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_beside_node(path: Path, *, overrides: Sequence[str] = ()) -> NodeConfig:
    """Like `load_config`, for a command that addresses a running node: keys missing in [fleet] come from the node's start.

    A scheduler tells each node its rank, but not the commands started next to it. Raises PathPermissionDenied, too.
    """
    table = _read(path, overrides)
    if isinstance(table.get("fleet"), dict):
        started = config_path(Path(str(table.get("state_dir", "/nonexistent"))))
        with named_if_denied(started, key="state_dir"):
            before = _toml(started).get("fleet", {}) if started.is_file() else {}
        table["fleet"] = {**before, **table["fleet"]}
    return config_of(table)


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The file's tables, with absolute paths."""
    with named_if_denied(path, key="config"):
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            if path.is_dir():
                found = "has no node.toml or run.toml; give a node's TOML, its state folder or its run's folder"
            raise PathNotFound(f"config {path} {found}", path=path)
        table = _toml(path)
    _anchor_paths(table, path.resolve().parent)
    for override in overrides:
        _apply(table, override)
    _anchor_paths(table, Path.cwd())
    return table


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, max_bytes=MAX_CONFIG_BYTES).decode().removeprefix("\ufeff"))
    # Includes TOMLDecodeError, UnicodeDecodeError and the interpreter's limits on digits and nesting.
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("config", f"{path} is not TOML: {error}") from error


def _keys_beside(location: Sequence[str | int]) -> list[str]:
    """Keys of the table that the location's last part is in; none if the table cannot be told."""
    table: type[BaseModel] = NodeConfig
    for part in location[:-1]:
        field = table.model_fields.get(str(part))
        kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
        tables = [one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(tables) != 1:
            return []
        table = tables[0]
    return list(table.model_fields)


def _explain(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        similar = get_close_matches(str(problem["loc"][-1]), _keys_beside(problem["loc"]), n=1)
        meant = f", did you mean {similar[0]}?" if similar else ""
        return f"unknown key{meant or ';'} see docs/reference/config.md for the keys of this table"
    if problem["type"] == "missing":
        return "required, but not given"
    if isinstance(problem["input"], Mapping):  # a whole table with conflicting keys
        return str(problem.get("ctx", {}).get("error", problem["msg"]))
    message = _WANTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    text = repr(problem["input"])
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    # Without user and password of a URL, for terminals and logs.
    return f"{message} (got {re.sub(r'//[^/@]*@', '//***@', shown)})"


def _apply(table: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InvalidArgument("set", f"expected a.b=value, got {override!r}")
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        read = {"value": text}
    value = read.pop("value")
    if read:
        raise InvalidArgument("set", f"gives {key.strip()} more than one line, {text!r}; repeat --set for another key")
    put(table, key, value)


def put(table: dict[str, Any], key: str, value: object) -> None:
    """Sets a key of tables, such as "trainer.num_ranks"."""
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise InvalidArgument(key, f"{parent} is a value, not a table")
    table[last] = value


def _path_keys(table: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Keys of paths, or of lists of paths, in a table and those below it."""
    for name, field in table.model_fields.items():
        for kind in get_args(field.annotation) or (field.annotation,):
            if kind is Path or get_args(kind)[:1] == (Path,):
                yield (name,)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from ((name, *below) for below in _path_keys(kind))


def _anchor_paths(table: dict[str, Any], folder: Path) -> None:
    for *parents, last in _path_keys(NodeConfig):
        at: Any = table
        for parent in parents:
            at = at.get(parent, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict) and isinstance(at.get(last), str | list):
            at[last] = _anchored(at[last], folder, key=".".join((*parents, last)))


def is_hub_dataset(value: str) -> bool:
    return _HUB_DATASET.fullmatch(value) is not None and Path(value).suffix.lower() not in _DATA_SUFFIXES


def _anchored(value: Any, folder: Path, *, key: str) -> Any:
    """Makes a path, or each path in a list, absolute. Leaves other values for the schema to refuse."""
    if isinstance(value, list):
        return [_anchored(one, folder, key=key) for one in value]
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise InvalidArgument(key, f"{value!r} is not a path: it contains a null character")
    # An id of the Hugging Face hub stays a relative path until it is fetched.
    is_model = key in ("model.path", "trainer.critic.path")
    is_of_hub = is_hub_dataset(value) if key.endswith("dataset") else is_model and _HUB_MODEL.fullmatch(value)
    if is_of_hub and not (folder / value).exists():
        return value
    try:
        return str(folder / Path(value).expanduser())
    except RuntimeError as error:
        raise InvalidArgument(key, f"{value} names an unknown user's home; write the folder out") from error


_Row = tuple[str, object, object, bool, str]
"""A key, its value and default, whether it has an effect, and what would give it one."""


def without_effect(config: NodeConfig) -> list[str]:
    """Settings that differ from their defaults but have no effect beside others, each with what would give it one.

    A coefficient or count of 0 switches something off. Its settings may stay, so that one key switches it on again.
    """
    return [
        f"{key} = {value} has no effect: {needed}, or remove it"
        for key, value, default, has_effect, needed in _effects(config)
        if value != default and not has_effect
    ]


def _effects(config: NodeConfig) -> Iterator[_Row]:
    if config.sft is not None:
        has_prompts = config.sft.eval_dataset is not None
        yield "sft.eval_every", config.sft.eval_every, None, has_prompts, "give an sft.eval_dataset"
    if (train := config.train) is None:
        return
    advantages, loss, evaluation, estimator = train.advantages, train.loss, train.eval, train.advantages.estimator
    is_gae, divides = estimator == "gae", estimator in ("group_mean", "batch_baseline") or advantages.std == "none"
    is_by_token, gae = is_gae or estimator == "globally_whitened", 'use advantages.estimator = "gae"'
    yield "train.advantages.std", advantages.std, "sample", divides, 'use advantages.estimator = "group_mean"'
    yield "train.advantages.discount", advantages.discount, 1.0, is_by_token, gae
    yield "train.advantages.lam", advantages.lam, 1.0, is_gae, gae
    yield "train.advantages.whiten", advantages.whiten, True, is_gae, gae
    yield "train.value_loss.clip", train.value_loss.clip, None, is_gae, gae
    yield "train.old_policy", train.old_policy, "auto", loss.has_ratio, "the loss has no ratio; use another loss.name"
    truncates, needed = train.old_policy != "rollout", "a ratio to rollout's own log-probs needs none; use another old_policy"
    tokens, usual = loss.correction.token_truncation, type(loss.correction)().token_truncation
    yield "train.loss.correction.token_truncation", tokens, usual, truncates or tokens is None, needed
    sequences = loss.correction.sequence_truncation
    yield "train.loss.correction.sequence_truncation", sequences, None, truncates, needed
    yield "train.max_staleness", train.max_staleness, 0, train.oversample > 1, "set train.oversample above 1"
    held_out, needed = train.eval_dataset is not None, "give a train.eval_dataset"
    yield "train.eval_every", train.eval_every, None, held_out, needed
    yield "train.stop_at_eval_score", train.stop_at_eval_score, None, held_out, needed
    samples, needed = evaluation.temperature > 0, "greedy sampling takes the most likely token; raise train.eval.temperature"
    yield "train.eval.top_p", evaluation.top_p, None, samples, needed


def save_config(config: NodeConfig, path: Path) -> None:
    """Writes every key that has a value, including defaults, with absolute paths. load_config reads an equal configuration."""
    write_private(path, "\n".join(toml_lines(config.model_dump(mode="python", exclude_none=True), ())) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replaces a file by one for this user alone, whatever the umask."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def toml_lines(table: Mapping[str, Any], name: tuple[str, ...], *, comment: Callable[[str], str] = lambda _: "") -> list[str]:
    """Lines of a table and its subtables, each with a heading after an empty line. comment: of a key, such as "trainer.betas"."""
    lines = [f"[{'.'.join(map(_key, name))}]"] if name else []
    for key, value in table.items():
        if not isinstance(value, dict):
            told = comment(".".join((*name, key)))
            lines.append(f"{_key(key)} = {_value(value)}{told and f'  # {told}'}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *toml_lines(value, (*name, key), comment=comment)]
    return lines


def _key(key: str) -> str:
    """Quotes a key if needed: names of rewards are the user's."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Path():
            return _value(str(value.absolute()))
        case _:
            # JSON strings are TOML basic strings, except that TOML does not allow a raw DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
