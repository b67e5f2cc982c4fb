"""The store of torch.distributed behind the fleet's port, through which the ranks of all nodes meet.

Torch's own TCP store accepts keys from anyone who reaches its port. This one requires the node's certificate and the role peer.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import grpc
from torch.distributed import Store

from tasuki.config.schema import FleetConfig
from tasuki.v1 import rank_store_pb2 as pb
from tasuki.v1.rank_store_pb2_grpc import RankStoreServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.credentials import Credentials, authorization
from tasuki.wire.errors import DeadlineExceeded, PeerUnavailable, TasukiError, from_rpc_error

_ANSWER_MARGIN_S = 5.0
"""In addition to the server's own waiting time."""
_RETRY_S = 0.5


class FleetStore(Store):
    """The store of one start of a fleet's trainers. Callable from any thread, since grpc releases the GIL while it waits."""

    def __init__(self, stub: RankStoreServiceStub, name: str, *, metadata: Any, timeout: timedelta) -> None:
        """Use `join_ranks`."""
        super().__init__()
        self._stub, self._name, self._metadata, self._timeout = stub, name, metadata, timeout

    @property
    def name(self) -> str:
        return self._name

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> "FleetStore":
        return FleetStore(self._stub, self._name, metadata=self._metadata, timeout=self._timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(self._stub.SetKey, pb.SetKeyRequest(store=self._name, key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        timeout_s = self._timeout.total_seconds()
        request = pb.ReadKeyRequest(store=self._name, key=key, timeout_s=timeout_s)
        return self._call(self._stub.ReadKey, request, timeout_s=timeout_s).value

    def add(self, key: str, value: int) -> int:
        return self._call(self._stub.AddToKey, pb.AddToKeyRequest(store=self._name, key=key, amount=value)).total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        request = pb.CompareAndSetKeyRequest(
            store=self._name, key=key, expected=_bytes(expected_value), value=_bytes(desired_value)
        )
        return self._call(self._stub.CompareAndSetKey, request).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = (timeout or self._timeout).total_seconds()
        request = pb.WaitForKeysRequest(store=self._name, keys=keys, timeout_s=timeout_s)
        self._call(self._stub.WaitForKeys, request, timeout_s=timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(self._stub.CheckKeys, pb.CheckKeysRequest(store=self._name, keys=keys)).has_all

    def num_keys(self) -> int:
        return self._call(self._stub.CheckKeys, pb.CheckKeysRequest(store=self._name)).num_keys

    def delete_key(self, key: str) -> bool:
        return self._call(self._stub.DeleteKey, pb.DeleteKeyRequest(store=self._name, key=key)).was_there

    def _call(self, method: Callable[..., Any], request: Any, *, timeout_s: float = 0.0) -> Any:
        return _answer(method, request, metadata=self._metadata, timeout_s=timeout_s + _ANSWER_MARGIN_S)


def join_ranks(
    fleet: FleetConfig, credentials: Credentials | None, *, num_ranks: int, launch_id: str, recipe: str, timeout_s: float
) -> FleetStore:
    """Joins the store shared by all ranks of all nodes; waits until every node's trainer has started. Called by every rank.

    num_ranks: of this node. launch_id: of this start of the node's trainer. recipe: digest of the settings that must agree.
    Raises DeadlineExceeded naming the missing nodes, PeerUnavailable if the leader does not answer within `timeout_s`, and the errors
    of JoinRanks.
    """
    # Kept open for the life of the process: torch uses a store at any time.
    stub = RankStoreServiceStub(open_blocking_channel(fleet.leader, credentials=credentials))
    metadata = authorization(credentials)
    request = pb.JoinRanksRequest(
        fleet=fleet.name,
        attempt=fleet.attempt,
        num_nodes=fleet.num_nodes,
        node_rank=fleet.node_rank,
        num_ranks=num_ranks,
        launch_id=launch_id,
        recipe=recipe,
    )
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            joined = _answer(stub.JoinRanks, request, metadata=metadata, timeout_s=max(1.0, left_s))
        except PeerUnavailable as error:
            # The leader may start later than the trainers.
            if left_s < _RETRY_S:
                raise PeerUnavailable(f"the fleet's leader at {fleet.leader} does not answer: {error.message}") from error
            time.sleep(_RETRY_S)
        else:
            return FleetStore(stub, joined.store, metadata=metadata, timeout=timedelta(seconds=timeout_s))


def _answer(method: Callable[..., Any], request: Any, *, metadata: Any, timeout_s: float) -> Any:
    """Raises the error of the fleet's port as a TasukiError."""
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        known: TasukiError = from_rpc_error(error)
        if isinstance(known, DeadlineExceeded) and not known.message:
            known.message = "the fleet's leader did not answer in time"
        raise known from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
