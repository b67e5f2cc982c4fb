"""A node's own end: it joins, tells that it lives, and hears when the fleet has ended."""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from tasuki.config.fleet_schema import FleetConfig
from tasuki.fleet.member import Member
from tasuki.v1 import fleet_pb2
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    InvalidArgument,
    NotJoined,
    PeerUnavailable,
    TasukiError,
    from_rpc_error,
)

_log = logging.getLogger("tasuki.fleet")
_JOIN_EVERY_S = 1.0
_UNHEARD = (DeadlineExceeded, PeerUnavailable)
_FOREIGN = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's word, in what gRPC says of a handshake."""


class Membership:
    """`run` returns never; it raises what ends this node's part in the fleet."""

    def __init__(self, channel: grpc.aio.Channel, member: Member, config: FleetConfig, *, start_timeout_s: float) -> None:
        """channel: to the leader. start_timeout_s: how long a leader that was not there yet is waited for."""
        self._stub = FleetServiceStub(channel)
        self._member, self._config, self._start_timeout_s = member, config, start_timeout_s
        self.has_joined = asyncio.Event()

    async def run(self) -> None:
        """Raises FleetEnded when the leader says so, or is silent for `fleet.node_timeout_s`; a refusal of Join; NotJoined when no leader
        came; InvalidArgument for one whose certificate another authority has signed."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        every_s = _JOIN_EVERY_S
        while True:
            try:
                every_s = await self._tell(every_s)
                heard = clock()
            except _UNHEARD as error:
                silent_s = clock() - heard
                if not self.has_joined.is_set() and _FOREIGN in error.message:
                    problem = (
                        f"does not sign the certificate of the leader at {self._config.leader}: give all nodes certificates of one "
                        "authority, such as `tasuki certs --fleet` makes"
                    )
                    raise InvalidArgument("security.client_ca", problem) from error
                if isinstance(error, NotJoined):  # the leader was restarted: it lives, and is to be told at once
                    self.has_joined.clear()
                    heard = clock()
                elif self.has_joined.is_set() and silent_s > self._config.node_timeout_s:
                    text = (
                        f"the leader at {self._config.leader} was silent for {silent_s:.1f} s, longer than fleet.node_timeout_s"
                    )
                    raise FleetEnded(text, node_rank=0) from error
                elif silent_s > max(self._start_timeout_s, self._config.node_timeout_s):
                    text = f"no leader answered at {self._config.leader} in {silent_s:.0f} s: {error.message}"
                    raise NotJoined(text, node_rank=self._member.node_rank) from error
            await asyncio.sleep(every_s if self.has_joined.is_set() else _JOIN_EVERY_S)

    async def _tell(self, every_s: float) -> float:
        """Joins, or says that the node lives. Returns how often to say so."""
        name, attempt = self._config.name, self._config.attempt
        if self.has_joined.is_set():
            rank, boot_id = self._member.node_rank, self._member.boot_id
            beat = fleet_pb2.HeartbeatRequest(name=name, attempt=attempt, node_rank=rank, boot_id=boot_id)
            await _answer(self._stub.Heartbeat(beat, timeout=self._config.node_timeout_s / 2))
            return every_s
        join = fleet_pb2.JoinRequest(name=name, attempt=attempt, num_nodes=self._config.num_nodes, node=self._member.to_proto())
        answer = await _answer(self._stub.Join(join, timeout=self._config.node_timeout_s / 2))
        self.has_joined.set()
        _log.info(
            "event=joined leader=%s node_rank=%d joined=%d", self._config.leader, self._member.node_rank, answer.num_joined
        )
        return answer.heartbeat_s


async def _answer(call: object) -> fleet_pb2.JoinResponse:
    try:
        return await call  # pyright: ignore[reportGeneralTypeIssues]  either answer
    except grpc.aio.AioRpcError as error:
        raise _named(error) from error


def _named(error: grpc.aio.AioRpcError) -> TasukiError:
    return from_rpc_error(error)
