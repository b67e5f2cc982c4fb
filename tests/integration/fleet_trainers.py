"""Trainers of several nodes on this machine, each launched with a separate state folder, behind a fleet's front."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio

from tasuki.fleet.nodes import NodeChannels
from tasuki.fleet.trainer_front import TrainerFront
from tasuki.models.known import read_model_file
from tasuki.rpc.access import fleet_metadata
from tasuki.trainer.data.cost import sample_cost
from tasuki.trainer.data.plan import split_samples
from tasuki.v1 import trainer_pb2
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from tasuki.wire.channel import open_channel
from tests.fleet.network import LOOPBACK, Place, namespace_pair
from tests.integration.fleet_port import FLEET, FleetPort, fleet_port
from tests.integration.scripted_fleet import ScriptedFleet, served
from tests.integration.trainer_process import CALL_TIMEOUT_S, TrainerClient, TrainerProcess, command, start_trainer


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
                settings=f"[coordinator]\nstage_timeout_s = {connect_s}\n",
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


class Fleet(TrainerClient):
    """The trainers behind a fleet's front. clients: of each node."""

    def __init__(self, channel: grpc.aio.Channel, clients: list[TrainerClient]) -> None:
        super().__init__(channel)
        self.clients = clients
        self.dealt: Sequence[Sequence[int]] | None = None
        """Indices of each node's samples, in place of those of the plan."""


@asynccontextmanager
async def fleet_of(nodes: Sequence[TrainerProcess], model: Path, *, num_ranks: int = 1) -> AsyncIterator[Fleet]:
    """Serves the real front in this process."""
    cost = sample_cost(read_model_file(model))

    def deal(lengths: Sequence[int], completions: Sequence[int]) -> list[list[int]]:
        if fleet.dealt is not None:
            return [list(share) for share in fleet.dealt]
        return split_samples(
            lengths, completions=completions, num_nodes=len(nodes), num_ranks=num_ranks, max_tokens=4096, cost=cost
        )

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tasuki-")))
        metadata = fleet_metadata(FleetCommand(name=FLEET))
        channels = [await stack.enter_async_context(open_channel(node.target, metadata=metadata)) for node in nodes]
        scripted = ScriptedFleet([], [NodeChannels(channel, channel, channel) for channel in channels], folder, [])
        front = TrainerFront(scripted, epoch=0, deal=deal)
        add = add_TrainerServiceServicer_to_server
        channel = await stack.enter_async_context(served(folder, service="trainer", add=add, make=lambda: front))
        fleet = Fleet(channel, [TrainerClient(each) for each in channels])
        yield fleet


async def save_part(
    client: TrainerClient, path: Path, part: trainer_pb2.SavePart.ValueType, save_id: str
) -> trainer_pb2.SaveCheckpointResponse:
    request = trainer_pb2.SaveCheckpointRequest(command=command(), path=str(path), part=part, save_id=save_id)
    return await client.trainer.SaveCheckpoint(request, timeout=CALL_TIMEOUT_S)
