"""Digests of what all nodes of a fleet must share, and the joining node's own description."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasuki.config.gpus import gpus_of
from tasuki.config.paths import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.v1.fleet_pb2 import FleetNode
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import PathNotFound

_PER_NODE = {
    "trainer": ("devices",),
    "rollout": ("devices",),
    "metrics": ("listen",),
    "fleet": ("node_rank", "interface"),
}
"""Keys that may differ between nodes, like every path, [security], [paths] and [track]."""
_PER_NODE_TABLES = ("listen", "security", "paths", "track")
_PACKAGES = (
    "torch",
    "transformers",
    "sglang",
    "sglang-kernel",
    "flash-attn-4",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Packages whose other versions give other numbers, or do not connect."""
_SMALL_BYTES = 64 * 1024 * 1024
_KEY_DIGITS = 16


def this_member(config: NodeConfig, *, boot_id: str) -> FleetNode:
    """Describes the node of `config` for joining its fleet. Raises PathNotFound for an unreadable model folder."""
    assert config.fleet is not None
    gpus = gpus_of(config)
    targets = {**node_targets(config), **config.port_targets}
    keys = config_keys(config)
    return FleetNode(
        node_rank=config.fleet.node_rank,
        boot_id=boot_id,
        coordinator_target=targets["coordinator"],
        trainer_target=targets["trainer"],
        rollout_target=targets["rollout"],
        version=_version("tasuki") or "unknown",  # run from a checkout
        config_digest=config_digest(keys),
        num_ranks=config.trainer.num_ranks,
        num_gpus=len({*gpus.trainer, *gpus.rollout}) if config.device == "cuda" else 0,
        model_digest=model_digest(config.model.path),
        config_keys=keys,
        host=socket.gethostname(),
        packages={name: found for name in _PACKAGES if (found := _version(name)) is not None},
    )


def config_keys(config: NodeConfig) -> dict[str, str]:
    """Truncated SHA-256, in hex, of every key's value, except keys that may differ between nodes."""
    dump = config.model_dump(mode="python", exclude_none=True)
    for table, keys in _PER_NODE.items():
        for key in keys:
            dump.get(table, {}).pop(key, None)
    for table in _PER_NODE_TABLES:
        dump.pop(table, None)
    return {key: _digest(json.dumps(value, sort_keys=True, default=str))[:_KEY_DIGITS] for key, value in _flat(dump)}


def config_digest(keys: Mapping[str, str]) -> str:
    """SHA-256, in hex, of the whole configuration. keys: of `config_keys`."""
    return _digest(json.dumps(keys, sort_keys=True))


def model_digest(folder: Path) -> str:
    """SHA-256, in hex, of a model folder: its JSON and tokenizer files, and its tensors' names, dtypes, shapes and sizes.

    Values of weights are not read: SYNC compares them.
    """
    with named_if_denied(folder, key="model.path"):
        if not (folder / "config.json").is_file():
            raise PathNotFound(f"there is no config.json in {folder}", path=folder)
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file():
                for part in _meaning(path):
                    digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def _meaning(path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        yield path.name.encode()
        yield _header(path)
    elif path.suffix in (".json", ".model", ".txt", ".jinja") and path.stat().st_size < _SMALL_BYTES:
        yield path.name.encode()
        yield path.read_bytes()


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file, including its length prefix, and the file's size."""
    with path.open("rb") as file:
        length = file.read(8)
        num_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        return file.read(min(num_bytes, _SMALL_BYTES)) + str(path.stat().st_size).encode()


def _flat(table: Mapping[str, Any], *, above: str = "") -> Iterator[tuple[str, Any]]:
    """Flattened keys of all tables, as in `--set`, without paths."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, above=f"{above}{key}.")
        elif not isinstance(value, Path):
            yield f"{above}{key}", _without_paths(value) if isinstance(value, list | tuple) else value


def _without_paths(values: Sequence[Any]) -> list[Any]:
    return [dict(_flat(value)) if isinstance(value, Mapping) else value for value in values if not isinstance(value, Path)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
