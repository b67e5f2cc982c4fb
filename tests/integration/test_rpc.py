"""The rpc package over a real socket: fencing, replay, errors, health, reflection, metrics, address rules."""

import asyncio
import stat
import urllib.request
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tasuki.rpc.commands import CommandGate
from tasuki.rpc.server import RpcServer
from tasuki.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2
from tasuki.wire.channel import KEEPALIVE_CLIENT_MS, KEEPALIVE_SERVER_MIN_MS, MAX_MESSAGE_BYTES, open_channel
from tasuki.wire.errors import (
    DeadlineRequired,
    InternalError,
    InvalidArgument,
    MessageTooLarge,
    NodeRunning,
    PeerUnavailable,
    StageOrder,
    StaleEpoch,
    StaleSequence,
    TasukiError,
    from_rpc_error,
)

NAME = "tasuki.v1.TrainerService"


class CountingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Counts how often a command really ran."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.gate = CommandGate()
        self.release = asyncio.Event()
        self.release.set()

    async def OptimStep(self, request, context):
        async def step() -> trainer_pb2.OptimStepResponse:
            await self.release.wait()
            self.num_steps += 1
            return trainer_pb2.OptimStepResponse(policy_version=self.num_steps)

        return await self.gate.once(request, step)

    async def PublishWeights(self, request, context):
        async def publish() -> trainer_pb2.PublishWeightsResponse:
            if request.command.request_id == "out of order":
                raise StageOrder("not now")
            return trainer_pb2.PublishWeightsResponse(published_bytes=self.gate.sequence)

        return await self.gate.stage(request, publish)

    async def GetTrainerState(self, request, context):
        raise ValueError("a secret of the process")

    async def ComputeLogProbs(self, request_iterator, context):
        async for request in request_iterator:
            if not request.samples.samples:
                raise InvalidArgument("samples", "at least one is needed")
            yield trainer_pb2.ComputeLogProbsResponse()


Served = tuple[CountingTrainer, grpc.aio.Channel, RpcServer]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    servicer = CountingTrainer()
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/trainer.sock")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, NAME)
    await server.start()
    async with open_channel(server.target) as channel:
        yield servicer, channel, server
    await server.stop(grace_s=0)


def command(request_id: str, *, epoch: int = 0, sequence: int = 0) -> types_pb2.CommandId:
    return types_pb2.CommandId(epoch=epoch, sequence=sequence, request_id=request_id)


async def error_of(call: Awaitable[object]) -> TasukiError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_repeated_request_id_runs_once_even_while_it_runs(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.release.clear()
    calls = [stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=5) for _ in range(4)]
    await asyncio.sleep(0.05)
    servicer.release.set()
    answers = [await call for call in calls]
    assert [answer.policy_version for answer in answers] == [1, 1, 1, 1]
    assert servicer.num_steps == 1


async def test_a_request_id_used_for_another_request_is_refused(served) -> None:
    servicer, channel, _ = served
    servicer.gate.look(1)
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    first: Any = stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=5)
    await first
    other_content = stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a"), learning_rate=0.5), timeout=5)
    other_method = stub.PublishWeights(trainer_pb2.PublishWeightsRequest(command=command("a", epoch=1, sequence=1)), timeout=5)
    for call in (other_content, other_method):
        error = await error_of(call)
        assert isinstance(error, InvalidArgument) and error.metadata["field"] == "command.request_id"
    assert servicer.num_steps == 1


async def test_command_outlives_a_caller_that_times_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.release.clear()
    error = await error_of(stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("slow")), timeout=0.05))
    assert error.reason == "DEADLINE_EXCEEDED"
    servicer.release.set()
    answer = await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("slow")), timeout=5)
    assert answer.policy_version == servicer.num_steps == 1


async def test_lower_epoch_and_old_sequence_are_refused(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, epoch: int, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=epoch, sequence=sequence))
        return stub.PublishWeights(request, timeout=5)

    servicer.gate.look(7)
    assert (await publish("a", 7, 3)).published_bytes == 3
    stale = await error_of(publish("b", 6, 9))
    assert isinstance(stale, StaleEpoch) and stale.metadata == {"epoch": "6", "current_epoch": "7"}
    assert isinstance(await error_of(publish("c", 7, 3)), StaleSequence)
    servicer.gate.look(8)
    assert (await publish("d", 8, 1)).published_bytes == 1


async def test_epoch_that_no_coordinator_has_shown_is_refused_and_changes_nothing(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, epoch: int, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=epoch, sequence=sequence))
        return stub.PublishWeights(request, timeout=5)

    assert isinstance(await error_of(publish("before any look", 1, 1)), StaleEpoch)
    servicer.gate.look(7)
    for number, epoch in enumerate((8, 999, 2**40)):
        for sequence in (1, 2**40):
            wild = await error_of(publish(f"wild {number} {sequence}", epoch, sequence))
            assert isinstance(wild, StaleEpoch) and wild.metadata == {"epoch": str(epoch), "current_epoch": "7"}
    assert (servicer.gate.epoch, servicer.gate.sequence) == (0, 0)
    assert (await publish("a", 7, 1)).published_bytes == 1


async def test_sequence_that_no_coordinator_comes_to_is_refused_and_changes_nothing(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    def publish(request_id: str, sequence: int) -> Awaitable[trainer_pb2.PublishWeightsResponse]:
        request = trainer_pb2.PublishWeightsRequest(command=command(request_id, epoch=7, sequence=sequence))
        return stub.PublishWeights(request, timeout=5)

    servicer.gate.look(7)
    first = await error_of(publish("wild at first", 10**9))
    assert isinstance(first, InvalidArgument) and first.metadata["field"] == "command.sequence"
    # A service that was started anew late in an epoch sees a large number first.
    assert (await publish("late in the epoch", 5_000_000)).published_bytes == 5_000_000
    later = await error_of(publish("wild later", 10**9))
    assert isinstance(later, InvalidArgument) and later.metadata["current_sequence"] == "5000000"
    assert (await publish("next", 5_000_004)).published_bytes == 5_000_004


async def test_look_of_an_old_coordinator_that_arrives_late_shuts_the_new_one_not_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    for epoch in (6, 7, 6):
        servicer.gate.look(epoch)
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert (await stub.PublishWeights(first, timeout=5)).published_bytes == 1
    late = trainer_pb2.PublishWeightsRequest(command=command("late", epoch=6, sequence=9))
    assert isinstance(await error_of(stub.PublishWeights(late, timeout=5)), StaleEpoch)


async def test_refused_stage_and_data_command_do_not_shut_the_coordinator_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.gate.look(7)
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=3))
    await stub.PublishWeights(first, timeout=5)
    servicer.gate.look(999)
    wild = trainer_pb2.PublishWeightsRequest(command=command("out of order", epoch=999, sequence=10**7))
    assert isinstance(await error_of(stub.PublishWeights(wild, timeout=5)), StageOrder)
    await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("b", epoch=999)), timeout=5)
    assert (servicer.gate.epoch, servicer.gate.sequence) == (7, 3)
    servicer.gate.look(7)
    after = trainer_pb2.PublishWeightsRequest(command=command("c", epoch=7, sequence=4))
    assert (await stub.PublishWeights(after, timeout=5)).published_bytes == 4


async def test_command_that_arrives_after_a_refused_later_one_is_not_carried_out(served: Served) -> None:
    servicer, channel, _ = served
    servicer.gate.look(7)
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    refused = trainer_pb2.PublishWeightsRequest(command=command("out of order", epoch=7, sequence=4))
    assert isinstance(await error_of(stub.PublishWeights(refused, timeout=5)), StageOrder)
    late = trainer_pb2.PublishWeightsRequest(command=command("late", epoch=7, sequence=3))
    assert isinstance(await error_of(stub.PublishWeights(late, timeout=5)), StaleSequence)
    after = trainer_pb2.PublishWeightsRequest(command=command("next", epoch=7, sequence=5))
    assert (await stub.PublishWeights(after, timeout=5)).published_bytes == 5


async def test_command_of_an_old_epoch_that_arrives_after_a_newer_one_looked_is_not_carried_out(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.gate.look(7)
    servicer.gate.look(0)  # somebody else reads
    late = trainer_pb2.PublishWeightsRequest(command=command("late", epoch=6, sequence=9))
    stale = await error_of(stub.PublishWeights(late, timeout=5))
    assert isinstance(stale, StaleEpoch) and stale.metadata == {"epoch": "6", "current_epoch": "7"}
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert (await stub.PublishWeights(first, timeout=5)).published_bytes == 1


async def test_epoch_that_no_coordinator_has_shuts_none_out_for_longer_than_to_its_next_look(served: Served) -> None:
    servicer, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    servicer.gate.look(999)
    first = trainer_pb2.PublishWeightsRequest(command=command("a", epoch=7, sequence=1))
    assert isinstance(await error_of(stub.PublishWeights(first, timeout=5)), StaleEpoch)
    await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("b", epoch=7)), timeout=5)
    servicer.gate.look(7)
    second = trainer_pb2.PublishWeightsRequest(command=command("c", epoch=7, sequence=2))
    assert (await stub.PublishWeights(second, timeout=5)).published_bytes == 2


async def test_mutating_call_needs_deadline_and_request_id(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    assert isinstance(await error_of(stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")))), DeadlineRequired)
    missing = await error_of(stub.OptimStep(trainer_pb2.OptimStepRequest(), timeout=5))
    assert isinstance(missing, InvalidArgument) and missing.metadata["field"] == "command.request_id"


async def test_unknown_exception_keeps_its_text_on_the_server(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    error = await error_of(stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=5))
    assert isinstance(error, InternalError) and error.metadata["request_id"]
    assert "secret" not in error.message


async def test_error_in_a_stream_arrives_after_its_answers(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    full = trainer_pb2.TrainingSamples(samples=[types_pb2.TrainingSample()])
    requests = [trainer_pb2.ComputeLogProbsRequest(samples=full), trainer_pb2.ComputeLogProbsRequest()]
    answers = []
    with pytest.raises(grpc.RpcError) as caught:
        async for answer in stub.ComputeLogProbs(iter(requests), timeout=5):
            answers.append(answer)
    error = from_rpc_error(caught.value)
    assert len(answers) == 1 and isinstance(error, InvalidArgument) and error.metadata["field"] == "samples"


async def test_message_above_the_limit_is_a_typed_error(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    huge = trainer_pb2.OptimStepRequest(command=command("x" * (MAX_MESSAGE_BYTES + 1)))
    assert isinstance(await error_of(stub.OptimStep(huge, timeout=5)), MessageTooLarge)


async def test_health_shows_asleep_and_awake_and_list_answers(served: Served) -> None:
    _, channel, server = served
    stub = health_pb2_grpc.HealthStub(channel)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    generate = "tasuki.v1.RolloutService/Generate"
    await server.set_serving(generate, False)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=generate))
    assert (await watch.read()).status == not_serving
    await server.set_serving(generate, True)
    assert (await watch.read()).status == serving
    watch.cancel()
    for name in ("", NAME):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_under_both_names(served, version: str) -> None:
    _, channel, _ = served
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    symbols = [NAME, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in (*symbols, f"{NAME}.OptimStep")
    ]
    answers = [answer async for answer in call(iter(requests), timeout=5)]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert {*symbols, "grpc.health.v1.Health"} <= listed
    assert all(answer.file_descriptor_response.file_descriptor_proto for answer in answers[1:])


async def test_socket_is_private_and_gone_after_stop(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    server = RpcServer(service="trainer", target=f"unix:{path}")
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.stop()
    assert not path.exists()


async def test_a_call_that_its_server_does_not_survive_says_so(tmp_path: Path) -> None:
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    await server.start()
    async with open_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status
        stopping = asyncio.ensure_future(server.stop(grace_s=0.1))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await watch.read():  # a last word: not serving
                pass
        await stopping
    error = from_rpc_error(ended.value)
    assert isinstance(error, PeerUnavailable)
    assert "ended while the call ran (Cancelling all calls)" in error.message


async def test_second_server_on_a_live_address_is_refused(tmp_path: Path) -> None:
    first = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    await first.start()
    with pytest.raises(NodeRunning):
        await RpcServer(service="trainer", target=first.target).start()
    async with open_channel(first.target) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)).status
    await first.stop()


async def test_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "a.sock"))
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    await server.start()
    await server.stop()


async def test_second_server_on_a_tcp_port_is_refused(unused_tcp_port: int) -> None:
    first = RpcServer(service="trainer", target=f"127.0.0.1:{unused_tcp_port}")
    await first.start()
    with pytest.raises(NodeRunning):
        await RpcServer(service="trainer", target=first.target).start()
    await first.stop()


@pytest.mark.parametrize("target", ["0.0.0.0:5000", "10.0.0.1:5000", "[::]:5000"])
async def test_plain_tcp_beyond_loopback_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgument, match="loopback"):
        await RpcServer(service="trainer", target=target).start()


async def test_metrics_have_the_usual_names(tmp_path: Path, unused_tcp_port: int) -> None:
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock", metrics_port=unused_tcp_port)
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, CountingTrainer(), NAME)
    await server.start()
    async with open_channel(server.target) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=5)
        await error_of(stub.OptimStep(trainer_pb2.OptimStepRequest(), timeout=5))
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    labels = f'grpc_method="OptimStep",grpc_service="{NAME}",grpc_type="unary"'
    assert f"grpc_server_started_total{{{labels}}} 2.0" in text
    assert f'grpc_server_handled_total{{grpc_code="OK",{labels}}} 1.0' in text
    assert f'grpc_server_handled_total{{grpc_code="InvalidArgument",{labels}}} 1.0' in text
    assert "grpc_server_handling_seconds_bucket" in text
    await server.stop()


async def test_stop_tells_watchers_and_refuses_new_calls(served: Served) -> None:
    _, channel, server = served
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.create_task(server.stop(grace_s=0.5))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await stopping
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    error = await error_of(stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("late")), timeout=1))
    assert isinstance(error, PeerUnavailable | TasukiError) and error.reason in ("PEER_UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_client_keepalive_stays_above_what_the_server_tolerates() -> None:
    assert KEEPALIVE_CLIENT_MS > KEEPALIVE_SERVER_MIN_MS
