"""A node's side of its membership: joins, sends heartbeats, and learns when the fleet has ended."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

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
_LEAVE_TIMEOUT_S = 2.0
_FOREIGN = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ]+))?")
"""OpenSSL's message within gRPC's error for a handshake."""
_REFUSED = "Connection refused"
"""gRPC's error if a machine answers but no process listens."""
_CLOSED = "Socket closed"
"""gRPC's error if the peer has rejected a certificate, among other causes."""
_ADVICE = "give all nodes certificates of one CA, valid now by their clocks, such as those of `tasuki certs --fleet`"


class Membership:
    """A node's membership. `run` never returns; it raises the error that ends the membership."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        member: Member,
        config: FleetConfig,
        *,
        start_timeout_s: float,
        is_refused: Callable[[], bool] = lambda: False,
    ) -> None:
        """channel: to the leader. start_timeout_s: how long to wait for the leader to appear.

        is_refused: whether the leader rejects this node's certificate; may block.
        """
        self._stub = FleetServiceStub(channel)
        self._member, self._config, self._start_timeout_s = member, config, start_timeout_s
        self._is_refused = is_refused
        self.has_joined = asyncio.Event()

    async def run(self) -> None:
        """Raises FleetEnded if the leader says so or is silent for `fleet.node_timeout_s`; the error of a refused Join; NotJoined if no
        leader appeared; InvalidArgument for certificates of different CAs."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        every_s = _JOIN_EVERY_S
        while True:
            try:
                every_s = await self._tell(every_s)
                heard = clock()
            except _UNHEARD as error:
                silent_s = clock() - heard
                if not self.has_joined.is_set():
                    await self._check_certificates(error)
                if isinstance(error, NotJoined):  # the leader has restarted; join again at once
                    self.has_joined.clear()
                    heard = clock()
                elif self.has_joined.is_set() and silent_s > self._config.node_timeout_s:
                    raise FleetEnded(self._silence(silent_s, error), node_rank=0) from error
                elif silent_s > max(self._start_timeout_s, self._config.node_timeout_s):
                    text = f"no leader answered at {self._config.leader} in {silent_s:.0f} s: {error.message}"
                    raise NotJoined(text, node_rank=self._member.node_rank) from error
            await asyncio.sleep(every_s if self.has_joined.is_set() else _JOIN_EVERY_S)

    def _silence(self, silent_s: float, error: TasukiError) -> str:
        text = f"the leader at {self._config.leader} was silent for {silent_s:.1f} s, longer than fleet.node_timeout_s"
        return f"{text}; nothing listens there any more: it was stopped or has ended" if _REFUSED in error.message else text

    async def _check_certificates(self, error: TasukiError) -> None:
        """Raises InvalidArgument if one side rejects the other's certificate."""
        leader = f"the leader at {self._config.leader}"
        if found := _FOREIGN.search(error.message):
            problem = f"does not sign the certificate of {leader} ({found[1] or 'not verified'}): {_ADVICE}"
            raise InvalidArgument("security.client_ca", problem) from error
        if _CLOSED in error.message and await asyncio.to_thread(self._is_refused):
            raise InvalidArgument("security.cert", f"{leader} does not take this node's certificate: {_ADVICE}") from error

    async def leave(self, why: str) -> None:
        """Tells the leader why this node ends, such as "was stopped by its operator". Ignores a leader that does not answer."""
        if self.has_joined.is_set():
            with suppress(TasukiError):
                await _answer(self._stub.Heartbeat(self._beat(ends_because=why), timeout=_LEAVE_TIMEOUT_S))

    def _beat(self, *, ends_because: str = "") -> fleet_pb2.HeartbeatRequest:
        now = Timestamp()
        now.FromNanoseconds(time.time_ns())
        return fleet_pb2.HeartbeatRequest(
            name=self._config.name,
            attempt=self._config.attempt,
            node_rank=self._member.node_rank,
            boot_id=self._member.boot_id,
            ends_because=ends_because,
            time=now,
        )

    async def _tell(self, every_s: float) -> float:
        """Joins, or sends a heartbeat. Returns the heartbeat interval in seconds."""
        if self.has_joined.is_set():
            await _answer(self._stub.Heartbeat(self._beat(), timeout=self._config.node_timeout_s / 2))
            return every_s
        name, attempt = self._config.name, self._config.attempt
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
