"""The rpc package over a real socket: errors, health, reflection, metrics, address rules."""

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tasuki.rpc.access import Access, ClientPaths, local_caller
from tasuki.rpc.port import Port
from tasuki.rpc.server import RpcServer
from tasuki.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2
from tasuki.v1.metrics_pb2 import GetMetricsRequest
from tasuki.v1.metrics_pb2_grpc import MetricsServiceStub
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import DeadlineRequired, InternalError, InvalidArgument, NodeRunning, PeerUnavailable, from_rpc_error
from tests.integration.counting_trainer import NAME, CountingTrainer, Served, command, serving
from tests.refusal import refused


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


async def test_mutating_call_needs_deadline_and_request_id(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    assert isinstance(await refused(stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")))), DeadlineRequired)
    missing = await refused(stub.OptimStep(trainer_pb2.OptimStepRequest(), timeout=60))
    assert isinstance(missing, InvalidArgument) and missing.metadata["field"] == "command.request_id"


async def test_unknown_exception_keeps_its_text_on_the_server(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    error = await refused(stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=60))
    assert isinstance(error, InternalError) and error.metadata["request_id"]
    assert "secret" not in error.message


@pytest.mark.parametrize("letter", ["x", "\x1b", "é", "\U0001f600"])
async def test_a_long_refusal_arrives_as_itself_with_its_text_cut(served: Served, letter: str) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    error = await refused(stub.PublishWeights(trainer_pb2.PublishWeightsRequest(command=command(letter * 5000)), timeout=60))
    assert isinstance(error, InvalidArgument) and error.metadata["field"] == "request_id"
    assert letter * 100 in error.message and error.message.endswith("... (cut; 5012 characters)")
    assert letter * 100 in error.metadata["given"] and error.metadata["given"].endswith("... (cut; 5000 characters)")


async def test_error_in_a_stream_arrives_after_its_answers(served: Served) -> None:
    _, channel, _ = served
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    full = trainer_pb2.TrainingSamples(samples=[types_pb2.TrainingSample()])
    requests = [trainer_pb2.ComputeLogProbsRequest(samples=full), trainer_pb2.ComputeLogProbsRequest()]
    answers = []
    with pytest.raises(grpc.RpcError) as caught:
        async for answer in stub.ComputeLogProbs(iter(requests), timeout=60):
            answers.append(answer)
    error = from_rpc_error(caught.value)
    assert len(answers) == 1 and isinstance(error, InvalidArgument) and error.metadata["field"] == "samples"


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        *(f"/{NAME}/{method}" for method in ("OptimStep", "ComputeLogProbs")),
    ],
)
async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, channel, _ = served
    for noise in (b"\xff\xff\xff", b"\x0a\x05\xff\xfe\xfd\xfc\xfb", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 200):
        with pytest.raises(grpc.RpcError) as caught:
            _ = [answer async for answer in channel.stream_stream(path)(iter([noise]), timeout=60)]
        assert isinstance(from_rpc_error(caught.value), InvalidArgument)
    assert not [record for record in caplog.records if record.exc_info]


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


async def test_reflection_lists_and_describes(served) -> None:
    _, channel, _ = served
    call = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    symbols = [NAME, "grpc.reflection.v1alpha.ServerReflection"]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in (*symbols, f"{NAME}.OptimStep")
    ]
    answers = [answer async for answer in call(iter(requests), timeout=60)]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert {*symbols, "grpc.health.v1.Health"} <= listed
    for answer in answers[1:]:
        assert answer.file_descriptor_response.file_descriptor_proto
    for answer in (answers[1], answers[3]):
        own = FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
        (rpc,) = (index for index, method in enumerate(own.service[0].method) if method.name == "OptimStep")
        (comment,) = (one.leading_comments for one in own.source_code_info.location if list(one.path) == [6, 0, 2, rpc])
        assert comment.startswith(" Clips a role's gradients")


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
            while await watch.read():  # a last answer: not serving
                pass
        await stopping
    error = from_rpc_error(ended.value)
    assert isinstance(error, PeerUnavailable)
    # gRPC reports the call or the connection, whichever it notices first
    assert "ended during the call (" in error.message


async def test_second_server_on_a_live_address_is_refused(tmp_path: Path) -> None:
    first = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    await first.start()
    with pytest.raises(NodeRunning):
        await RpcServer(service="trainer", target=first.target).start()
    async with open_channel(first.target) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)).status
    await first.stop()


async def test_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "a.sock"))
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    await server.start()
    await server.stop()


@pytest.mark.parametrize("target", ["0.0.0.0:5000", "10.0.0.1:5000", "[::]:5000"])
async def test_plain_tcp_beyond_loopback_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="loopback"):
        await RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock", port=plain_port(target, tmp_path)).start()


def plain_port(target: str, folder: Path) -> Port:
    access = Access(local_caller, ClientPaths(state_dir=folder, write=(), read=()))
    return Port(target=target, access=access, credentials=None)


async def test_metrics_have_the_usual_names(tmp_path: Path) -> None:
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, CountingTrainer(), NAME)
    await server.start()
    async with open_channel(server.target) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        await stub.OptimStep(trainer_pb2.OptimStepRequest(command=command("a")), timeout=60)
        await refused(stub.OptimStep(trainer_pb2.OptimStepRequest(), timeout=60))
        answer = await MetricsServiceStub(channel).GetMetrics(GetMetricsRequest(), timeout=60)
    text = answer.text.decode()
    labels = f'grpc_method="OptimStep",grpc_service="{NAME}",grpc_type="unary"'
    assert f"grpc_server_started_total{{{labels}}} 2.0" in text
    assert f'grpc_server_handled_total{{grpc_code="OK",{labels}}} 1.0' in text
    assert f'grpc_server_handled_total{{grpc_code="InvalidArgument",{labels}}} 1.0' in text
    assert "grpc_server_handling_seconds_bucket" in text
    await server.stop()
