"""tasuki.v1.RankStoreService: in-memory store through which the trainers of a fleet find each other."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasuki.trainer.other_nodes import END_KEY
from tasuki.v1 import rank_store_pb2 as pb
from tasuki.v1.rank_store_pb2_grpc import RankStoreServiceServicer
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument, StaleEpoch

MAX_VALUE_BYTES = 1 << 20
_MAX_KEY_BYTES = 1 << 10
_MAX_KEYS = 1 << 16
_MAX_STORE_BYTES = 1 << 28
_MAX_WAIT_S = 3600.0
_NOBODY = pb.JoinRanksRequest()


@dataclass(slots=True, eq=False)
class _Store:
    """Store of one start of all trainers."""

    name: str
    values: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    ended_by: str = ""
    """Why it has ended; empty while it is in use."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def put(self, key: str, value: bytes) -> None:
        """Stores a value. Raises InvalidArgument if it is too large."""
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidArgument("value", f"has {len(value)} bytes; at most {MAX_VALUE_BYTES} are kept")
        if not key or key == END_KEY or len(key.encode()) > _MAX_KEY_BYTES:
            raise InvalidArgument("key", f"must have 1 to {_MAX_KEY_BYTES} bytes, and not be {END_KEY!r}")
        num_bytes = self.num_bytes + len(value) - len(self.values.get(key, b""))
        if num_bytes > _MAX_STORE_BYTES or (key not in self.values and len(self.values) >= _MAX_KEYS):
            raise InvalidArgument("key", f"the store is full: it takes {_MAX_KEYS} keys and {_MAX_STORE_BYTES} bytes")
        self.values[key], self.num_bytes = value, num_bytes

    def pop(self, key: str) -> bool:
        value = self.values.pop(key, None)
        self.num_bytes -= len(value or b"")
        return value is not None


class RankStoreServicer(RankStoreServiceServicer):
    """Serves the nodes of one fleet in one attempt of its job."""

    def __init__(self, *, fleet: str, attempt: int, num_nodes: int) -> None:
        self._fleet, self._attempt, self._num_nodes = fleet, attempt, num_nodes
        self._joining: dict[int, pb.JoinRanksRequest] = {}
        """Launches that wait for the others, by node."""
        self._joined: dict[int, str] = {}
        """Launch in the present store, by node."""
        self._store: _Store | None = None
        self._news = asyncio.Condition()

    async def JoinRanks(self, request: pb.JoinRanksRequest, context: Any) -> pb.JoinRanksResponse:
        self._check(request)
        rank, launch_id = request.node_rank, request.launch_id
        async with self._news:
            if self._joined.get(rank) != launch_id:
                ended, self._store, self._joined = self._store, None, {}
                if ended is not None:
                    async with ended.changed:
                        ended.ended_by = f"the trainer of node {rank} was started again"
                        ended.changed.notify_all()
                self._joining[rank] = request
                if len(self._joining) == self._num_nodes:
                    self._store = _Store(uuid.uuid4().hex)
                    self._joined = {node: each.launch_id for node, each in self._joining.items()}
                    self._joining = {}
                self._news.notify_all()
            left = context.time_remaining()
            try:
                async with asyncio.timeout(_MAX_WAIT_S if left is None else max(0.0, left - 0.5)):
                    await self._news.wait_for(lambda: self._joining.get(rank, _NOBODY).launch_id != launch_id)
            except TimeoutError as error:
                missing = sorted(set(range(self._num_nodes)) - self._joining.keys())
                raise DeadlineExceeded(
                    f"the trainers of nodes {missing} have not joined the fleet {self._fleet}", nodes=missing
                ) from error
            if self._store is None or self._joined.get(rank) != launch_id:
                raise StaleEpoch(f"the trainer of node {rank} was started again, and another launch has joined")
            return pb.JoinRanksResponse(store=self._store.name)

    async def SetKey(self, request: pb.SetKeyRequest, context: Any) -> pb.SetKeyResponse:
        await self._change(request.store, lambda store: store.put(request.key, request.value))
        return pb.SetKeyResponse()

    async def ReadKey(self, request: pb.ReadKeyRequest, context: Any) -> pb.ReadKeyResponse:
        store = await self._wait(request.store, [request.key], timeout_s=request.timeout_s)
        return pb.ReadKeyResponse(value=store.values[request.key])

    async def AddToKey(self, request: pb.AddToKeyRequest, context: Any) -> pb.AddToKeyResponse:
        def add(store: _Store) -> int:
            total = _number(store.values.get(request.key, b"0")) + request.amount
            store.put(request.key, str(total).encode())
            return total

        return pb.AddToKeyResponse(total=await self._change(request.store, add))

    async def CompareAndSetKey(self, request: pb.CompareAndSetKeyRequest, context: Any) -> pb.CompareAndSetKeyResponse:
        def exchange(store: _Store) -> bytes:
            if store.values.get(request.key, b"") == request.expected:
                store.put(request.key, request.value)
            return store.values.get(request.key, request.expected)

        return pb.CompareAndSetKeyResponse(value=await self._change(request.store, exchange))

    async def WaitForKeys(self, request: pb.WaitForKeysRequest, context: Any) -> pb.WaitForKeysResponse:
        # The end of a store is heard of once a trainer waits for the others, or another store is there, also after a restart.
        if list(request.keys) == [END_KEY] and (self._store is None or self._store.name != request.store):
            try:
                async with _timeout(request.timeout_s), self._news:
                    await self._news.wait_for(lambda: bool(self._joining) or self._store is not None)
            except TimeoutError as error:
                raise DeadlineExceeded(f"no trainer was started again within {request.timeout_s:g} s") from error
        await self._wait(request.store, request.keys, timeout_s=request.timeout_s)
        return pb.WaitForKeysResponse()

    async def CheckKeys(self, request: pb.CheckKeysRequest, context: Any) -> pb.CheckKeysResponse:
        values = self._living(request.store).values
        return pb.CheckKeysResponse(has_all=all(key in values for key in request.keys), num_keys=len(values))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, context: Any) -> pb.DeleteKeyResponse:
        return pb.DeleteKeyResponse(was_there=await self._change(request.store, lambda store: store.pop(request.key)))

    def _check(self, request: pb.JoinRanksRequest) -> None:
        """Raises InvalidArgument, or StaleEpoch for another attempt."""
        for name, mine in (("fleet", self._fleet), ("num_nodes", self._num_nodes)):
            if getattr(request, name) != mine:
                raise InvalidArgument(name, f"is {getattr(request, name)!r}, and that of the leader {mine!r}")
        if request.attempt != self._attempt:
            text = f"node {request.node_rank} is of attempt {request.attempt} of the job, the leader of {self._attempt}"
            raise StaleEpoch(text, epoch=request.attempt, current_epoch=self._attempt)
        if request.node_rank >= self._num_nodes:
            raise InvalidArgument("node_rank", f"is {request.node_rank}, and the fleet has {self._num_nodes} nodes")
        if not request.launch_id:
            raise InvalidArgument("launch_id", "is missing")
        for other in (each for rank, each in self._joining.items() if rank != request.node_rank):
            for name in ("num_ranks", "recipe"):
                here, there = getattr(request, name), getattr(other, name)
                if here != there:
                    text = f"is {here} on node {request.node_rank} and {there} on node {other.node_rank}; nodes train alike"
                    raise InvalidArgument(name, text)

    def _living(self, name: str) -> _Store:
        """Raises StaleEpoch for a store that has ended."""
        if self._store is None or self._store.name != name:
            raise StaleEpoch("this start of the trainers is over: one of them was started again")
        return self._store

    async def _change(self, name: str, act: Callable[[_Store], Any]) -> Any:
        store = self._living(name)
        async with store.changed:
            result = act(store)
            store.changed.notify_all()
        return result

    async def _wait(self, name: str, keys: Sequence[str], *, timeout_s: float) -> _Store:
        """Returns once all keys are there. Raises DeadlineExceeded, or StaleEpoch when the store ends."""
        store = self._living(name)
        try:
            async with _timeout(timeout_s), store.changed:
                await store.changed.wait_for(lambda: bool(store.ended_by) or all(key in store.values for key in keys))
        except TimeoutError as error:
            missing = [key for key in keys if key not in store.values]
            raise DeadlineExceeded(f"no rank has set {', '.join(missing[:5])} within {timeout_s:g} s") from error
        if store.ended_by:
            raise StaleEpoch(store.ended_by)
        return store


def _timeout(timeout_s: float) -> asyncio.Timeout:
    return asyncio.timeout(min(max(timeout_s, 0.0), _MAX_WAIT_S))


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument("key", "its value is no number") from None
