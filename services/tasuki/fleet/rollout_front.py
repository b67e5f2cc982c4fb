"""tasuki.v1.RolloutService over a fleet's nodes, which share the prompts: clients see a single, larger engine."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tasuki.fleet.nodes import FleetNodes, NodeChannels, on_all
from tasuki.fleet.rules import merged_rollout_state, refuse_stage, renumbered, worst
from tasuki.rollout.seeds import CallSeeds, sample_seed
from tasuki.rollout.sessions import SessionPlaces, shares
from tasuki.rpc.commands import remaining_s
from tasuki.v1 import rollout_pb2, rollout_pb2_grpc
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.wire.errors import PeerUnavailable, SamplesLost, TasukiError, VersionOrder, from_rpc_error
from tasuki.wire.routes import is_part

_READ_TIMEOUT_S = 10.0

_Arrivals: TypeAlias = asyncio.Queue[rollout_pb2.GenerateResponse | BaseException | None]
"""Responses of several streams. Each stream ends with None, or with the error that ended it."""


@dataclass(slots=True)
class _Part:
    """A range of prompts on one node."""

    node: int
    """Rank of the node."""
    prompts: range
    missing: dict[int, int] = field(default_factory=dict)
    """Missing samples, by the prompt's position in the call."""
    error: TasukiError | None = None


class RolloutFront(rollout_pb2_grpc.RolloutServiceServicer):
    """Distributes the prompts of a call over the nodes and merges their streams."""

    ReceiveWeights = Drain = refuse_stage

    def __init__(self, nodes: FleetNodes, *, seeds: CallSeeds | None) -> None:
        """seeds: None if engines do not use seeds."""
        self._nodes, self._seeds = nodes, seeds
        self._sessions = SessionPlaces()
        self._loads = [0] * nodes.num_nodes
        """Samples outstanding on each node. Nobody else may generate there, so this is its load."""

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        nodes = self._nodes.all()
        request = await self._with_seed(request, leader=nodes[0])
        # Prompts with other images share no KV cache, whatever their text.
        prompts = [[*map(hash, prompt.images), *prompt.token_ids] for prompt in request.prompts]
        if request.session_key:
            place = self._sessions.place(request.session_key, self._loads)
            dealt = [[range(len(prompts))] if node == place else [] for node in range(len(nodes))]
        else:
            dealt = deal_prompts(prompts, num_samples=request.num_samples, loads=self._loads)
        parts = [_Part(node, run, dict.fromkeys(run, request.num_samples)) for node, share in enumerate(dealt) for run in share]
        # Node 0 refuses a call without prompts.
        async with aclosing(self._merged(nodes, request, parts or [_Part(0, range(0))], remaining_s(context))) as responses:
            async for response in responses:
                yield response
        lost = [part for part in parts if part.error is not None]
        if lost:
            lacking = runs(sorted(position for part in lost for position, missing in part.missing.items() if missing))
            named = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in lacking)
            causes = "; ".join(sorted({part.error.message for part in lost if part.error is not None}))
            on = ",".join(map(str, sorted({part.node for part in lost})))
            text = f"node {on} was lost while it generated, and prompts {named} lack samples: {causes}"
            raise SamplesLost(text, nodes=on, prompts=named)

    async def GetRolloutState(
        self, request: rollout_pb2.GetRolloutStateRequest, context: Any
    ) -> rollout_pb2.GetRolloutStateResponse:
        return merged_rollout_state(await _states(self._nodes.all()))

    async def _with_seed(self, request: rollout_pb2.GenerateRequest, *, leader: NodeChannels) -> rollout_pb2.GenerateRequest:
        """Sets a seed, so that samples do not depend on the node of their prompt."""
        if self._seeds is None or request.sampling_params.HasField("sampling_seed"):
            return request
        state = (await _states([leader]))[0]
        if not state.HasField("policy_version"):
            return request  # the node will report why it does not generate
        seeded, seed = deepcopy(request), self._seeds.of(request, version=state.policy_version)
        seeded.sampling_params.sampling_seed = sample_seed(seed, prompt=0, sample=0)
        return seeded

    async def _merged(
        self, nodes: Sequence[NodeChannels], request: rollout_pb2.GenerateRequest, parts: Sequence[_Part], timeout_s: float
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse]:
        """Yields the parts' samples by the call's positions. A lost node is recorded in its part's `error`; other errors end all parts."""
        arrivals: _Arrivals = asyncio.Queue()
        for part in parts:
            self._loads[part.node] += sum(part.missing.values())
        streams = [self._part(nodes[part.node], request, part, timeout_s=timeout_s) for part in parts]
        readers = [asyncio.create_task(_enqueue(stream, arrivals)) for stream in streams]
        versions: set[int] = set()
        num_open = len(parts)
        try:
            while num_open:
                arrival = await arrivals.get()
                if isinstance(arrival, BaseException):
                    raise arrival
                if arrival is None:
                    num_open -= 1
                    continue
                versions.update(sample.policy_version for sample in arrival.samples if not is_part(sample))
                if len(versions) > 1:
                    have, want = sorted(versions)
                    raise VersionOrder(f"nodes serve two versions: {have} and {want}", have=have, want=want)
                yield arrival
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for part in parts:
                self._loads[part.node] -= sum(part.missing.values())

    async def _part(
        self, node: NodeChannels, request: rollout_pb2.GenerateRequest, part: _Part, *, timeout_s: float
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse]:
        share = rollout_pb2.GenerateRequest(
            request_id=request.request_id,
            prompts=[request.prompts[position] for position in part.prompts],
            num_samples=request.num_samples,
            sampling_params=request.sampling_params,
            first_prompt=request.first_prompt + part.prompts.start,
            session_key=request.session_key,
            cut_on_drain=request.cut_on_drain,
        )
        try:
            async for response in RolloutServiceStub(node.rollout).Generate(share, timeout=timeout_s):
                for sample in response.samples:
                    sample.prompt_index += part.prompts.start
                    if is_part(sample):
                        continue
                    part.missing[sample.prompt_index] -= 1
                    self._loads[part.node] -= 1
                yield response
        except grpc.aio.AioRpcError as rpc_error:
            error = renumbered(from_rpc_error(rpc_error), field="prompts", positions=part.prompts)
            part.error = worst({part.node: error})
            if type(error) is not PeerUnavailable:
                raise part.error from rpc_error
        else:
            if any(part.missing.values()):
                part.error = PeerUnavailable(f"node {part.node} ended its stream without all samples")


async def _enqueue(responses: AsyncGenerator[rollout_pb2.GenerateResponse], arrivals: _Arrivals) -> None:
    """Reads a stream to its end."""
    try:
        async with aclosing(responses):
            async for response in responses:
                arrivals.put_nowait(response)
    except BaseException as error:  # passed to the reader of the queue
        arrivals.put_nowait(error)
        raise
    arrivals.put_nowait(None)


async def _states(nodes: Sequence[NodeChannels]) -> list[rollout_pb2.GetRolloutStateResponse]:
    request = rollout_pb2.GetRolloutStateRequest()
    return await on_all(
        nodes, lambda _, node: RolloutServiceStub(node.rollout).GetRolloutState(request, timeout=_READ_TIMEOUT_S)
    )


TokenIds = Sequence[int]


def deal_prompts(prompts: Sequence[TokenIds], *, num_samples: int, loads: Sequence[int]) -> list[list[range]]:
    """Positions of each node's prompts, as contiguous ranges, so that all nodes have about equal work.

    All samples of a prompt go to one node, and so do prompts that share their KV cache (`prompt_families`).

    loads: samples already running or queued on each node.
    """
    families = prompt_families(prompts)
    dealt = deal_families([num_samples * len(family) for family in families], loads=loads)
    return [runs(sorted(position for index in share for position in families[index])) for share in dealt]


def prompt_families(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Groups prompts of which one is a prefix of all others, as in successive turns of a conversation. Ordered by their first.

    A merely common prefix, such as a system prompt, does not group them: it would group all.
    """
    families: dict[int, list[int]] = {}
    root = -1
    # In sorted order, prompts follow their prefix directly.
    for position in sorted(range(len(prompts)), key=lambda position: tuple(prompts[position])):
        if root < 0 or list(prompts[position][: len(prompts[root])]) != list(prompts[root]):
            root = position
        families.setdefault(root, []).append(position)
    return sorted(map(sorted, families.values()))


def deal_families(sizes: Sequence[int], *, loads: Sequence[int]) -> list[list[int]]:
    """Indices of the families for each node: contiguous, each assigned to the node in whose share its middle lies.

    sizes: samples of each family.
    """
    ends = [share.stop for share in shares(loads, sum(sizes))]
    dealt: list[list[int]] = [[] for _ in loads]
    begin = 0
    for index, size in enumerate(sizes):
        dealt[min(bisect_left(ends, begin + size / 2), len(loads) - 1)].append(index)
        begin += size
    return dealt


def runs(positions: Sequence[int]) -> list[range]:
    """Joins consecutive positions to ranges. positions: ascending."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs
