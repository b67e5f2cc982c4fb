"""A node's side of its membership: describes itself, joins, sends heartbeats, and learns when the fleet has ended."""

import asyncio
import hashlib
import json
import logging
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc.aio

from tasuki.config.gpus import gpus_of
from tasuki.config.load import leaves
from tasuki.config.paths import node_targets
from tasuki.config.schema import FleetConfig, NodeConfig
from tasuki.fleet.nodes import answered
from tasuki.runs.recipe import model_digest
from tasuki.v1 import fleet_pb2
from tasuki.v1.fleet_pb2 import FleetNode
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    InvalidArgument,
    NotJoined,
    PathNotFound,
    PeerUnavailable,
    TasukiError,
)

_PER_NODE = {"trainer": ("devices",), "rollout": ("devices",), "metrics": ("listen",), "fleet": ("node_rank", "interface")}
"""Keys that may differ between nodes, like every path, [security], [paths] and [track]."""
_PER_NODE_TABLES = ("listen", "security", "paths", "track")
_PACKAGES = ("torch", "transformers", "sglang", "sglang-kernel", "flash-attn-4", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Packages whose other versions give other numbers, or do not connect."""
_KEY_DIGITS = 16


def this_member(config: NodeConfig, *, boot_id: str) -> FleetNode:
    """Describes the node of `config` for joining its fleet. Raises PathNotFound for an unreadable model folder."""
    assert config.fleet is not None
    folder, gpus = config.model.path, gpus_of(config)
    with named_if_denied(folder, key="model.path"):
        if not (folder / "config.json").is_file():
            raise PathNotFound(f"there is no config.json in {folder}", path=folder)
        of_model = model_digest(config)  # of the tensors' names and shapes: SYNC compares their values
    targets = {**node_targets(config), **config.port_targets}
    keys = config_keys(config)
    return FleetNode(
        node_rank=config.fleet.node_rank,
        boot_id=boot_id,
        **{f"{name}_target": targets[name] for name in ("coordinator", "trainer", "rollout")},
        version=_version("tasuki") or "unknown",  # run from a checkout
        config_digest=config_digest(keys),
        num_ranks=config.trainer.num_ranks,
        num_gpus=len({*gpus.trainer, *gpus.rollout}) if config.device == "cuda" else 0,
        model_digest=of_model,
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
    values = {key: value for key, value in leaves(dump) if not isinstance(value, Path)}
    return {key: _digest(json.dumps(value, sort_keys=True, default=str))[:_KEY_DIGITS] for key, value in values.items()}


def config_digest(keys: Mapping[str, str]) -> str:
    """SHA-256, in hex, of the whole configuration. keys: of `config_keys`."""
    return _digest(json.dumps(keys, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_log = logging.getLogger("tasuki.fleet")
_JOIN_EVERY_S = 1.0
_UNHEARD = (DeadlineExceeded, PeerUnavailable)
_LEAVE_TIMEOUT_S = 2.0
_FOREIGN = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ]+))?")
"""OpenSSL's message within gRPC's error for a handshake."""
_HINTS = {
    "Connection refused": "nothing listens there any more: it was stopped or has ended",
    "Socket closed": "it may not accept this node's certificate: see security.client_ca of node 0, and the clocks",
}
"""What gRPC's errors mean at a leader."""


class Membership:
    """A node's membership. `run` never returns; it raises the error that ends the membership."""

    def __init__(
        self, channel: grpc.aio.Channel, node: fleet_pb2.FleetNode, config: FleetConfig, *, start_timeout_s: float
    ) -> None:
        """channel: to the leader. start_timeout_s: how long to wait for the leader to appear."""
        self._stub: Any = FleetServiceStub(channel)
        self._node, self._config, self._start_timeout_s = node, config, start_timeout_s
        self.has_joined = asyncio.Event()

    async def run(self) -> None:
        """Raises FleetEnded if the leader says so or is silent for too long; the error of a refused Join; NotJoined if no
        leader appeared; InvalidArgument for a leader with a certificate of another CA."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        every_s = _JOIN_EVERY_S
        while True:
            try:
                every_s = await self._tell(every_s)
                heard = clock()
            except _UNHEARD as error:
                silent_s = clock() - heard
                if isinstance(error, NotJoined):  # the leader has restarted; join again at once
                    self.has_joined.clear()
                    heard = clock()
                elif self.has_joined.is_set():
                    if silent_s > self._config.node_timeout_s:
                        text = f"the leader at {self._config.leader} was silent for {silent_s:.1f} s"
                        raise FleetEnded(_explained(text, error), node_rank=0) from error
                elif found := _FOREIGN.search(error.message):
                    problem = (
                        f"does not sign the certificate of the leader at {self._config.leader} ({found[1] or 'not verified'}): give all "
                        "nodes certificates of one CA, valid now by their clocks, such as those of `tasuki certs --fleet`"
                    )
                    raise InvalidArgument("security.client_ca", problem) from error
                elif silent_s > max(self._start_timeout_s, self._config.node_timeout_s):
                    text = f"no leader answered at {self._config.leader} in {silent_s:.0f} s: {error.message}"
                    raise NotJoined(_explained(text, error), node_rank=self._node.node_rank) from error
            await asyncio.sleep(every_s if self.has_joined.is_set() else _JOIN_EVERY_S)

    async def leave(self, why: str) -> None:
        """Tells the leader why this node ends, such as "was stopped by its operator". Ignores a leader that does not answer."""
        if self.has_joined.is_set():
            with suppress(TasukiError):
                await answered(self._stub.Heartbeat(self._beat(ends_because=why), timeout=_LEAVE_TIMEOUT_S))

    def _beat(self, *, ends_because: str = "") -> fleet_pb2.HeartbeatRequest:
        beat = fleet_pb2.HeartbeatRequest(name=self._config.name, attempt=self._config.attempt, ends_because=ends_because)
        beat.node_rank, beat.boot_id = self._node.node_rank, self._node.boot_id
        beat.time.FromNanoseconds(time.time_ns())
        return beat

    async def _tell(self, every_s: float) -> float:
        """Joins, or sends a heartbeat. Returns the heartbeat interval in seconds."""
        config = self._config
        if self.has_joined.is_set():
            await answered(self._stub.Heartbeat(self._beat(), timeout=config.node_timeout_s / 2))
            return every_s
        join = fleet_pb2.JoinRequest(name=config.name, attempt=config.attempt, num_nodes=config.num_nodes, node=self._node)
        answer = await answered(self._stub.Join(join, timeout=config.node_timeout_s / 2))
        self.has_joined.set()
        _log.info("event=joined leader=%s node_rank=%d joined=%d", config.leader, self._node.node_rank, answer.num_joined)
        return answer.heartbeat_s


def _explained(text: str, error: TasukiError) -> str:
    hints = [hint for sign, hint in _HINTS.items() if sign in error.message]
    return "; ".join([text, *hints])
