"""A fleet over real gRPC: nodes join, change over together, accept commands from nobody else, and learn of each other's ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from tasuki.client.async_client import AsyncClient
from tasuki.client.types import Phase
from tasuki.config.lock import Instance
from tasuki.config.schema import FleetConfig, NodeConfig
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.operations import CoordinatorServicer, FleetHold
from tasuki.fleet.__main__ import _why_it_stops
from tasuki.fleet.fleet import Fleet
from tasuki.fleet.journal import FleetJournal
from tasuki.fleet.lead import make_server
from tasuki.fleet.membership import Membership, this_member
from tasuki.fleet.nodes import FleetNodes, NodePeer
from tasuki.node.exit_report import write_exit_report
from tasuki.node.start import check_place
from tasuki.rpc.access import fleet_metadata
from tasuki.rpc.server import RpcServer
from tasuki.v1 import coordinator_pb2, fleet_pb2, rollout_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub, add_CoordinatorServiceServicer_to_server
from tasuki.v1.fleet_pb2 import FleetCommand, FleetNode
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceServicer, RolloutServiceStub, add_RolloutServiceServicer_to_server
from tasuki.wire.address import split_host_port
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import FleetEnded, FleetMismatch, HeldByFleet, NodeRunning, NotJoined, StaleEpoch, StaleSequence
from tasuki.wire.tracing import NO_TRACER, Tracer, open_tracer
from tests.otlp import ReceivedSpan, receiving
from tests.ports import free_port
from tests.refusal import refused
from tests.sparse_weights import write_sparse_weights
from tests.unit.simulated_fleet import MemberNode

TIMEOUT_S = 20.0
TO_ROLLOUT = ("LOAD_WEIGHTS", "RESUME_WEIGHTS", "SYNC", "OFFLOAD", "RESUME_KV")
MODEL = (
    '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}'
)
TRAIN, ROLLOUT = types_pb2.PHASE_TRAIN, types_pb2.PHASE_ROLLOUT


def config_of(folder: Path, rank: int, leader: str) -> NodeConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(MODEL)
    write_sparse_weights(model)
    fleet = {"name": "f", "num_nodes": 2, "node_rank": rank, "leader": leader, "attempt": 1}
    return NodeConfig.model_validate(
        {"state_dir": folder / f"n{rank}", "model": {"path": model}, "security": {"insecure": True}, "fleet": fleet}
    )


class QuietRollout(RolloutServiceServicer):
    """Reports its state and generates nothing."""

    async def GetRolloutState(self, request: rollout_pb2.GetRolloutStateRequest, context: Any) -> Any:
        return rollout_pb2.GetRolloutStateResponse(dp_size=1)


@asynccontextmanager
async def serving_node(config: NodeConfig, *, tracer: Tracer = NO_TRACER) -> AsyncIterator[MemberNode]:
    """Serves a node's coordinator, and a rollout that generates nothing, on their sockets. tracer: of the coordinator's calls."""
    assert config.fleet is not None
    config.state_dir.mkdir(exist_ok=True)
    node = MemberNode(config.state_dir, config.fleet.node_rank, config.fleet, on_served=lambda: None)
    member = this_member(config, boot_id="b")
    Path(member.coordinator_target.removeprefix("unix:")).parent.mkdir(exist_ok=True)
    servicer = CoordinatorServicer(node.node, node._journal, SimpleNamespace(), instance=Instance(), port_targets={})
    servers = [RpcServer(service="coordinator", target=member.coordinator_target, fleet=config.fleet, tracer=tracer)]
    servers[0].add(add_CoordinatorServiceServicer_to_server, servicer, "tasuki.v1.CoordinatorService")
    servers.append(RpcServer(service="rollout", target=member.rollout_target, fleet=config.fleet))
    servers[1].add(add_RolloutServiceServicer_to_server, QuietRollout(), "tasuki.v1.RolloutService")
    for server in servers:
        await server.start()
    try:
        yield node
    finally:
        for server in servers:
            await server.stop(grace_s=0)
        await node.close()


@asynccontextmanager
async def leading(config: NodeConfig, *, patience_s: float = 20.0, tracer: Tracer = NO_TRACER) -> AsyncIterator[FleetNodes]:
    """Serves the fleet as its leader."""
    assert config.fleet is not None
    config.state_dir.mkdir(exist_ok=True)
    (config.state_dir / "run").mkdir(mode=0o700, exist_ok=True)
    journal = FleetJournal(config.state_dir / "fleet.sqlite")
    epoch = journal.begin_life("l", attempt=config.fleet.attempt, num_nodes=config.fleet.num_nodes)
    nodes = FleetNodes(config, epoch=epoch, tracer=tracer)
    peers = [NodePeer(nodes, rank, config.coordinator) for rank in range(nodes.num_nodes)]
    target = config.fleet.leader
    fleet = Fleet(journal, peers, boot_id="l", target=target, patience_s=patience_s, end=nodes.end, tracer=tracer)
    server = make_server(config, fleet, journal, nodes, this_member(config, boot_id="b0"), tracer=tracer)
    await server.start()
    tasks = [asyncio.create_task(fleet.recover()), asyncio.create_task(nodes.watch_silence())]
    try:
        yield nodes
    finally:
        for task in tasks:
            task.cancel()
        await fleet.stop()
        await server.stop(grace_s=0)
        await nodes.close()
        journal.close()


async def test_an_operation_that_missed_a_node_is_tried_again_under_its_id(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(configs[0], patience_s=0.5))
        for config in configs:
            await stack.enter_async_context(serving_node(config))
        channel = await stack.enter_async_context(open_channel(leader))
        fleet = CoordinatorServiceStub(channel)
        assert isinstance(await refused(acquire_first(fleet, TRAIN, request_id="one")), NotJoined)
        for config in configs:
            await join(channel, this_member(config, boot_id=f"b{config.fleet.node_rank}"))
        assert (await acquire(fleet, TRAIN, request_id="one"))[-1].state.phase == TRAIN


def leader_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def join(channel: grpc.aio.Channel, member: FleetNode, *, attempt: int = 1, name: str = "f") -> fleet_pb2.JoinResponse:
    request = fleet_pb2.JoinRequest(name=name, attempt=attempt, num_nodes=2, node=member)
    return await FleetServiceStub(channel).Join(request, timeout=TIMEOUT_S)


async def acquire(stub: Any, phase: int, **given: Any) -> list[coordinator_pb2.AcquireResponse]:
    request = coordinator_pb2.AcquireRequest(phase=phase, **given)
    return [answer async for answer in stub.Acquire(request, timeout=TIMEOUT_S)]


async def test_two_nodes_change_over_together_and_the_fleet_looks_like_a_node(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(leading(configs[0]))
        first, second = [await stack.enter_async_context(serving_node(config)) for config in configs]
        async with open_channel(leader) as channel:
            fleet = CoordinatorServiceStub(channel)
            for config in configs:
                await join(channel, this_member(config, boot_id=f"b{config.fleet.node_rank}"))
            told = await acquire(fleet, ROLLOUT)
            assert told[-1].state.phase == ROLLOUT
            stages = [
                types_pb2.Stage.Name(answer.event.stage) for answer in told if answer.event.status == 2 and answer.event.stage
            ]
            assert stages == [f"STAGE_{name}" for name in TO_ROLLOUT]
            assert first.serves == second.serves == (0, 0)
            state = (await fleet.GetState(coordinator_pb2.GetStateRequest(), timeout=TIMEOUT_S)).state
            assert (state.policy_version, state.trainer_target, state.rollout_target) == (0, leader, leader)
            told = await acquire(fleet, TRAIN)
            assert told[-1].state.phase == TRAIN
            listed = await fleet.ListChangeovers(coordinator_pb2.ListChangeoversRequest(), timeout=TIMEOUT_S)
            assert [len(one.stages) for one in listed.changeovers] == [4, 5]
            seen = await FleetServiceStub(channel).GetFleet(fleet_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
            assert ([member.node.boot_id for member in seen.members], seen.num_nodes) == (["b0", "b1"], 2)


async def test_a_changeover_of_a_fleet_is_one_trace_over_its_nodes(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    with receiving() as receiver:
        async with AsyncExitStack() as stack:

            def tracer(service: str, rank: int) -> Tracer:
                made = open_tracer(receiver.endpoint, service=service, node_rank=rank)
                stack.push_async_callback(asyncio.to_thread, made.close)
                return made

            await stack.enter_async_context(leading(configs[0], tracer=tracer("fleet", 0)))
            for rank, config in enumerate(configs):
                await stack.enter_async_context(serving_node(config, tracer=tracer("coordinator", rank)))
            async with open_channel(leader) as channel:
                for rank, config in enumerate(configs):
                    await join(channel, this_member(config, boot_id=f"b{rank}"))
            client = await stack.enter_async_context(AsyncClient(leader, otlp_endpoint=receiver.endpoint))
            await client.acquire(Phase.ROLLOUT)
        changeover, stages = receiver.one("changeover to ROLLOUT"), [receiver.one(f"stage {stage}") for stage in TO_ROLLOUT]
    by_id = {span.span_id: span for span in receiver.spans}

    def above(span: ReceivedSpan) -> list[str]:
        found = []
        while span.parent_id:
            span = by_id[span.parent_id]
            found.append(f"{span.service} {span.name.rpartition('/')[2]}")
        return found

    assert above(changeover) == ["tasuki-fleet Acquire", "tasuki-client Acquire"]
    for stage in stages:
        assert by_id[stage.parent_id] is changeover
        assert stage.attributes["tasuki.changeover_id"] == changeover.attributes["tasuki.changeover_id"]
        served = [
            span
            for span in receiver.spans
            if span.service == "tasuki-coordinator" and by_id[span.parent_id].parent_id == stage.span_id
        ]
        assert sorted(span.node_rank for span in served) == [0, 1]
        assert all(above(span)[:2] == ["tasuki-fleet RunStage", f"tasuki-fleet {stage.name}"] for span in served)
    assert {span.trace_id for span in (*stages, changeover)} == {changeover.trace_id}


async def test_a_node_of_a_fleet_refuses_clients_other_fleets_and_older_lives(tmp_path: Path) -> None:
    config = config_of(tmp_path, 1, "10.0.0.1:50050")
    target = this_member(config, boot_id="b").coordinator_target

    def command(**changed: Any) -> FleetCommand:
        return FleetCommand(**{"name": "f", "attempt": 1, "epoch": 5, "sequence": 1, **changed})

    async with serving_node(config), open_channel(target) as beside:
        error = await refused(acquire_first(CoordinatorServiceStub(beside), TRAIN))
        assert isinstance(error, HeldByFleet)
        assert error.metadata == {"fleet": "f", "address": "10.0.0.1:50050"}
        rollout = this_member(config, boot_id="b").rollout_target
        async with open_channel(rollout) as clients:
            generate = RolloutServiceStub(clients).Generate(rollout_pb2.GenerateRequest(), timeout=TIMEOUT_S)
            assert isinstance(await refused(generate.read()), HeldByFleet)
        for changed, expected in (({"name": "g"}, HeldByFleet), ({"attempt": 0}, StaleEpoch), ({"attempt": 2}, StaleEpoch)):
            other = command(**changed)
            async with open_channel(target, metadata=fleet_metadata(other)) as channel:
                assert isinstance(await refused(acquire_first(CoordinatorServiceStub(channel), TRAIN, fleet=other)), expected)
        async with open_channel(target, metadata=fleet_metadata(command())) as channel:
            stub = CoordinatorServiceStub(channel)
            look = coordinator_pb2.GetStateRequest(fleet=command(sequence=7))
            assert (await stub.GetState(look, timeout=TIMEOUT_S)).state.phase == TRAIN
            # The channel repeats a read whose answer was lost; a command must not reuse the number of a read.
            assert (await stub.GetState(look, timeout=TIMEOUT_S)).state.phase == TRAIN
            assert isinstance(await refused(acquire_first(stub, TRAIN, fleet=command(sequence=7))), StaleSequence)
            late_look = coordinator_pb2.GetStateRequest(fleet=command(sequence=6))
            assert isinstance(await refused(stub.GetState(late_look, timeout=TIMEOUT_S)), StaleSequence)
            late = acquire_first(stub, TRAIN, fleet=command(sequence=6))
            assert isinstance(await refused(late), StaleSequence)
            assert isinstance(await refused(acquire_first(stub, TRAIN, fleet=command(epoch=4, sequence=9))), StaleEpoch)
            assert (await acquire(stub, TRAIN, fleet=command(epoch=6)))[-1].state.phase == TRAIN
    # Epoch and sequence are on disk.
    journal = Journal(config.state_dir / "journal.sqlite")
    with pytest.raises(StaleEpoch):
        FleetHold(journal).check(command(sequence=99))
    journal.close()


async def acquire_first(stub: Any, phase: int, **given: Any) -> coordinator_pb2.AcquireResponse:
    return (await acquire(stub, phase, **given))[0]


async def test_the_leader_takes_a_rank_once_and_a_node_that_fits(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    member = this_member(configs[1], boot_id="b1")
    async with leading(configs[0]) as nodes, open_channel(leader) as channel:
        with pytest.raises(NotJoined):
            nodes.all()
        other = this_member(configs[1], boot_id="b1")
        other.num_gpus = 8
        assert isinstance(await refused(join(channel, other)), FleetMismatch)
        assert isinstance(await refused(join(channel, member, attempt=0)), StaleEpoch)
        assert (await join(channel, member)).num_joined == 1
        assert (await join(channel, member)).num_joined == 1
        assert isinstance(await refused(join(channel, this_member(configs[1], boot_id="b2"))), FleetMismatch)
        beat = fleet_pb2.HeartbeatRequest(name="f", attempt=1, node_rank=1, boot_id="b2")
        assert isinstance(await refused(FleetServiceStub(channel).Heartbeat(beat, timeout=TIMEOUT_S)), NotJoined)


async def test_a_silent_node_ends_the_fleet_and_the_others_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetConfig, "node_timeout_s", 3.0)
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with leading(configs[0]) as nodes, open_channel(leader) as channel:
        members = [this_member(config, boot_id=f"b{rank}") for rank, config in enumerate(configs)]
        living = asyncio.create_task(Membership(channel, members[0], configs[0].fleet, start_timeout_s=30.0).run())
        await join(channel, members[1])  # and is silent from then on
        with pytest.raises(FleetEnded) as told:
            await asyncio.wait_for(living, 60.0)
        assert told.value.metadata["node_rank"] == "1"
        assert "was silent" in told.value.message
        with pytest.raises(FleetEnded):
            nodes.all()
        assert isinstance(await refused(join(channel, members[1])), FleetEnded)


async def test_a_node_that_is_stopped_ends_the_fleet_at_once_and_says_why(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with leading(configs[0]) as nodes, open_channel(leader) as channel:
        members = [this_member(config, boot_id=f"b{rank}") for rank, config in enumerate(configs)]
        await join(channel, members[0])
        membership = Membership(channel, members[1], configs[1].fleet, start_timeout_s=30.0)
        await membership.leave("is not in the fleet yet")
        living = asyncio.create_task(membership.run())
        async with asyncio.timeout(TIMEOUT_S):
            await membership.has_joined.wait()
        await membership._tell(1.0)
        seen = await FleetServiceStub(channel).GetFleet(fleet_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
        assert not seen.members[0].HasField("clock_skew_s")
        assert seen.members[1].HasField("clock_skew_s") and abs(seen.members[1].clock_skew_s) < 1.0
        configs[1].state_dir.mkdir()
        write_exit_report(configs[1].state_dir, reason="asked by SIGTERM", first=None)
        await membership.leave(_why_it_stops(configs[1].state_dir))
        living.cancel()
        assert nodes.error is not None
        assert nodes.error.message == "the fleet has ended: node 1 was stopped by its operator; restart the job"
        assert nodes.error.metadata["node_rank"] == "1"
        told = await refused(join(channel, members[0]))
        assert isinstance(told, FleetEnded) and told.message == nodes.error.message


def test_a_leader_whose_port_is_taken_is_refused_before_it_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, 0, leader_address())
    assert config.fleet is not None
    check_place(config)
    with socket.create_server(split_host_port(config.fleet.leader)), pytest.raises(NodeRunning) as told:
        check_place(config)
    assert told.value.message.startswith(f"fleet.leader: node 0 cannot serve on {config.fleet.leader}: ")
    assert "MASTER_PORT" in told.value.message


async def test_a_node_joins_again_when_the_leader_was_restarted_and_ends_when_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetConfig, "node_timeout_s", 2.0)
    leader = leader_address()
    config = config_of(tmp_path, 0, leader)
    assert isinstance(config.fleet, FleetConfig)
    async with open_channel(leader) as channel:
        membership = Membership(channel, this_member(config, boot_id="b0"), config.fleet, start_timeout_s=30.0)
        living = asyncio.create_task(membership.run())
        for _ in range(2):
            async with leading(config) as nodes:
                async with asyncio.timeout(60.0):
                    while not nodes.joined:
                        await asyncio.sleep(0.05)
        with pytest.raises(
            FleetEnded, match="the leader at .* was silent .*; nothing listens there any more: it was stopped or has ended"
        ):
            await asyncio.wait_for(living, 60.0)
