"""Compares a configuration with the running node, whose own settings are fixed at its start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import config_path
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import InvalidArgument

# The run's tables, and the folder that identifies the node.
_OF_THE_RUN = {"state_dir", "train", "sft", "track"}


def adopt_node(config: NodeConfig) -> NodeConfig:
    """Combines the run's tables of `config` with the running node's settings; returns `config` if no node runs.

    Raises InvalidArgument naming the first key set in `config` that differs on the node. A critic that `config` does not mention is left
    out: the run does not use it.
    """
    node = running_settings(config)
    if node is None:
        return config
    _check_same(config.model_dump(exclude=_OF_THE_RUN, exclude_unset=True), node, config.state_dir)
    trainer = node.trainer if config.trainer.critic is not None else node.trainer.model_copy(update={"critic": None})
    own = {name: getattr(config, name) for name in _OF_THE_RUN}
    return node.model_copy(update={**own, "trainer": trainer})


def check_node_runs_with(config: NodeConfig) -> None:
    """Raises InvalidArgument naming the first key, including defaults, in which the running node differs from `config`."""
    node = running_settings(config)
    if node is None:
        return
    given = config.model_dump(exclude=_OF_THE_RUN)
    if config.trainer.critic is None:
        del given["trainer"]["critic"]
    _check_same(given, node, config.state_dir)


def running_settings(config: NodeConfig) -> NodeConfig | None:
    """Settings of the node running in the state folder; None if none runs."""
    path = config_path(config.state_dir)
    if holder(config.state_dir, name=NODE_LOCK) is None or not path.is_file():
        return None
    return load_config(path)


def _check_same(given: Mapping[str, Any], node: NodeConfig, state_dir: Path) -> None:
    found = _difference(given, node.model_dump(), "")
    if found is not None:
        key, is_, was = found
        # The only required key.
        other_way = "" if key == "model.path" else ", or remove the key to use the node's"
        raise InvalidArgument(
            key,
            f"is {_shown(is_)} here and {_shown(was)} on the node that is running; stop it first with: tasuki down --state-dir "
            f"{state_dir}{other_way}",
        )


def _difference(given: Mapping[str, Any], node: Mapping[str, Any], above: str) -> tuple[str, Any, Any] | None:
    """The first key that differs, in schema order, with both values."""
    for name, value in given.items():
        key, was = f"{above}{name}", node[name]
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            found = _difference(value, was, f"{key}.")
            if found is not None:
                return found
        elif _place(value) != _place(was):
            return key, value, was
    return None


def _place(value: object) -> object:
    return value.resolve() if isinstance(value, Path) else value


def _shown(value: object) -> str:
    match value:
        case None:
            return "not set"
        case Mapping():
            return "a table"
        case Path():
            return str(value)
        case _:
            return repr(value)
