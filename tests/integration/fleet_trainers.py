"""Trainers of several nodes on this machine, each launched with a separate state folder, and calls to all of them as a fleet makes them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasuki.algorithms.loss_types import LossConfig
from tasuki.planner.model_shape import read_model_file
from tasuki.rpc.fleet_caller import fleet_metadata
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.shares import call_denominator, deal_samples
from tasuki.trainer.ranks.loss import decode_loss
from tasuki.trainer.service.joined import joined_answers
from tasuki.v1 import loss_pb2, trainer_pb2
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.v1.types_pb2 import ROLE_POLICY, Role, TrainingSample
from tasuki.wire.channel import open_channel
from tests.fleet.network import LOOPBACK, Place, namespace_pair
from tests.integration.fleet_port import FLEET, FleetPort, fleet_port
from tests.integration.trainer_process import (
    CALL_TIMEOUT_S,
    PPO,
    TrainerClient,
    TrainerProcess,
    command,
    start_trainer,
)

Dealt = Sequence[Sequence[int]]
"""Indices of each node's samples."""


@contextmanager
def nodes_of(
    folder: Path, model: Path, *, num_nodes: int, num_ranks: int = 1, settings: str = "", port: FleetPort | None = None
) -> Iterator[list[TrainerProcess]]:
    """Starts the trainers and waits until all serve. port: of a fleet that is already served. settings: lines of [trainer]."""
    if port is None:
        with (
            fleet_port(folder / "fleet", num_nodes=num_nodes) as served,
            nodes_of(folder, model, num_nodes=num_nodes, num_ranks=num_ranks, settings=settings, port=served) as nodes,
        ):
            yield nodes
        return
    nodes = [start_node(folder, model, port, rank, num_ranks=num_ranks, settings=settings) for rank in range(num_nodes)]
    try:
        for node in nodes:
            node.wait_until_serving()
        yield nodes
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.stop()


def start_node(
    folder: Path,
    model: Path,
    port: FleetPort,
    node_rank: int,
    *,
    num_ranks: int = 1,
    settings: str = "",
    place: Place = LOOPBACK,
    device: str = "cpu",
    environment: Mapping[str, str] = {},
) -> TrainerProcess:
    """place: the node's network and interface. environment: further variables, for a process that is not forked."""
    tables = f"{settings}\n{port.tables(node_rank, interface=place.interface)}"
    return start_trainer(
        folder / f"node-{node_rank}",
        model,
        num_ranks=num_ranks,
        settings=tables,
        inside=[*place.prefix, *(("env", *(f"{name}={value}" for name, value in environment.items())) if environment else ())],
        device=device,
    )


def logs_of_unconnected(folder: Path, model: Path, *, connect_s: int, most_s: float, device: str = "cpu") -> list[str]:
    """Runs two trainers that join the fleet but cannot reach each other's interface; returns their logs. Needs root.

    Both must end with an error within `most_s`.
    """
    with namespace_pair() as (one, other), fleet_port(folder / "port", num_nodes=2, host=one.host) as port:
        alone = Place(LOOPBACK.host, LOOPBACK.interface, other.prefix)
        nodes = [
            start_node(
                folder,
                model,
                port,
                rank,
                settings=f"collective_timeout_s = {connect_s}\n",
                place=place,
                device=device,
                environment={"NCCL_HOSTID": f"node-{rank}"},
            )
            for rank, place in enumerate((LOOPBACK, alone))
        ]
        try:
            codes = [node.process.wait(most_s) for node in nodes]
            assert all(codes)
            return [node.log.read_text() for node in nodes]
        finally:
            for node in nodes:
                if node.process.poll() is None:
                    node.stop()


@asynccontextmanager
async def fleet_of(nodes: Sequence[TrainerProcess], model: Path, *, num_ranks: int = 1) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        metadata = fleet_metadata(FleetCommand(name=FLEET))
        channels = [await stack.enter_async_context(open_channel(node.target, metadata=metadata)) for node in nodes]
        yield Fleet([TrainerClient(channel) for channel in channels], model, num_ranks)


@dataclass
class Fleet:
    """Sends each node its share: all nodes validate it before any begins."""

    clients: list[TrainerClient]
    model: Path
    num_ranks: int = 1

    async def on_all(self, call: Callable[[TrainerClient], Awaitable[object]]) -> list[object]:
        """Waits for all calls; raises the first error."""
        answers = await asyncio.gather(*(call(client) for client in self.clients), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return list(answers)

    def deal(self, samples: Sequence[TrainingSample]) -> Dealt:
        completions = [len(sample.completion_token_ids) for sample in samples]
        lengths = [len(sample.prompt_token_ids) + completion for sample, completion in zip(samples, completions, strict=True)]
        cost = sample_cost(read_model_file(self.model))
        num_nodes = len(self.clients)
        return deal_samples(
            lengths, completions=completions, num_nodes=num_nodes, num_ranks=self.num_ranks, max_tokens=4096, cost=cost
        )

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: loss_pb2.LossConfig = PPO,
        role: Role.ValueType = ROLE_POLICY,
        dealt: Dealt | None = None,
    ) -> trainer_pb2.ForwardBackwardResponse:
        """dealt: the shares; `deal` makes them by default."""
        shares = [[samples[position] for position in share] for share in dealt or self.deal(samples)]
        header = self.header(samples, loss, role)
        for validate_only in (True, False):
            header.validate_only = validate_only
            calls = [share_call(client, header, share) for client, share in zip(self.clients, shares, strict=True)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        return joined_answers([answer for answer in answers if isinstance(answer, trainer_pb2.ForwardBackwardResponse)])

    async def optim_step(self, *, role: Role.ValueType = ROLE_POLICY) -> list[trainer_pb2.OptimStepResponse]:
        """Makes an optimizer step on every node; returns their answers."""
        request = trainer_pb2.OptimStepRequest(command=command(), role=role, validate_only=True)
        await self.on_all(lambda client: client.trainer.OptimStep(request, timeout=CALL_TIMEOUT_S))
        request.validate_only = False
        answers = await self.on_all(lambda client: client.trainer.OptimStep(request, timeout=CALL_TIMEOUT_S))
        return [answer for answer in answers if isinstance(answer, trainer_pb2.OptimStepResponse)]

    async def save(self, path: Callable[[int], Path], *, between: Callable[[], Awaitable[None]] | None = None) -> None:
        """path: by node rank. between: runs when all have written and none has published."""
        save_id = uuid.uuid4().hex
        for part in (trainer_pb2.SAVE_PART_WRITE, trainer_pb2.SAVE_PART_PUBLISH):
            calls = [save_part(client, path(rank), part, save_id) for rank, client in enumerate(self.clients)]
            await asyncio.gather(*calls)
            if part == trainer_pb2.SAVE_PART_WRITE and between is not None:
                await between()

    def header(
        self, samples: Sequence[TrainingSample], loss: loss_pb2.LossConfig, role: Role.ValueType
    ) -> trainer_pb2.ForwardBackwardHeader:
        config: LossConfig = decode_loss(loss)
        masks = [list(sample.loss_mask) for sample in samples]
        lengths = [len(sample.completion_token_ids) for sample in samples]
        header = trainer_pb2.ForwardBackwardHeader(command=command(), role=role, loss=loss, is_share=True)
        header.loss.settings["denominator"] = call_denominator(masks, lengths, config=config)
        return header


async def share_call(
    client: TrainerClient, header: trainer_pb2.ForwardBackwardHeader, samples: Sequence[TrainingSample]
) -> trainer_pb2.ForwardBackwardResponse:
    async def requests() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
        yield trainer_pb2.ForwardBackwardRequest(header=header)
        yield trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples(samples=samples))

    return await client.trainer.ForwardBackward(requests(), timeout=CALL_TIMEOUT_S)


async def save_part(
    client: TrainerClient, path: Path, part: trainer_pb2.SavePart.ValueType, save_id: str
) -> trainer_pb2.SaveCheckpointResponse:
    request = trainer_pb2.SaveCheckpointRequest(command=command(), path=str(path), part=part, save_id=save_id)
    return await client.trainer.SaveCheckpoint(request, timeout=CALL_TIMEOUT_S)


def sums_of(checkpoint: Path) -> dict[str, list[int]]:
    """Returns checksums of every tensor of a checkpoint, for weights and optimizer."""
    index = json.loads((checkpoint / "tensors.json").read_text())
    return {name: [part["crc32"] for part in tensor["parts"]] for name, tensor in index.items()}
