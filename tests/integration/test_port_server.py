"""A service's port: unknown methods, odd headers, unfinished messages, and a path that ends grpcio's server."""

import asyncio
import io
import logging
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.node.__main__ import service_environment
from tasuki.rpc.access import Access, ClientPaths, local_caller
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.port import Port
from tasuki.rpc.server import RpcServer, cygrpc
from tasuki.v1 import trainer_pb2_grpc
from tasuki.wire.channel import MAX_PORT_CALLS, open_channel
from tasuki.wire.errors import ServiceFailed, from_rpc_error
from tests.conftest import ENVIRONMENT, ROOT
from tests.integration.counting_trainer import NAME, CountingTrainer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, MESSAGE = 4, 1, 0


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(path: bytes, further: dict[bytes, bytes] | None = None) -> bytes:
    """Returns the bytes of a connection with one call. further: headers shorter than 128 bytes."""
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost", b"te": b"trailers"}
    headers |= {b"content-type": b"application/grpc", **(further or {})}
    block = b"".join(b"\x00%c%b%c%b" % (len(name), name, len(value), value) for name, value in headers.items())
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 4, 1, block) + frame(MESSAGE, 1, 1, bytes(5))


async def send(port: int, path: bytes, further: dict[bytes, bytes] | None = None) -> bytes:
    """Returns the bytes received until a status, the connection's end, or a second without either."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(call(path, further))
    answer = b""
    try:
        async with asyncio.timeout(1.0):
            while b"grpc-status" not in answer and (more := await reader.read(4096)):
                answer += more
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return answer


@asynccontextmanager
async def serving(folder: Path, port: int, *, max_calls: int = MAX_PORT_CALLS) -> AsyncIterator[RpcServer]:
    access = Access(local_caller, ClientPaths(state_dir=folder, write=(), read=()))
    server = RpcServer(
        service="trainer",
        target=f"unix:{folder}/a.sock",
        port=Port(target=f"127.0.0.1:{port}", access=access, credentials=None, max_calls=max_calls),
    )
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, CountingTrainer(), NAME)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0)


async def check(target: str) -> None:
    async with open_channel(target) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)).status


async def test_a_path_that_is_not_utf8_is_refused_as_an_unknown_method(tmp_path: Path, unused_tcp_port: int) -> None:
    async with serving(tmp_path, unused_tcp_port) as server:
        for path in (b"/x/y\xff", b"/x/y", b"/tasuki.v1.TrainerService/OptimStep\xff"):
            assert b"grpc-status\x0212" in await send(unused_tcp_port, path)  # UNIMPLEMENTED
        await check(f"127.0.0.1:{unused_tcp_port}")
        async with open_channel(server.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/x/y")(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_header_that_is_not_utf8_is_not_logged(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, stderr = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr("sys.stderr", stderr)
    configure_logging("trainer")
    async with serving(tmp_path, unused_tcp_port):
        for _ in range(3):
            assert await send(
                unused_tcp_port, b"/tasuki.v1.MetricsService/GetMetrics", {b"authorization": b"Bearer s3cr3t\xff"}
            )
        logging.getLogger("grpc._cython.cygrpc").error(
            "ExecuteBatchError raised in core by servicer method [/x/y]"
        )  # of a reset call
        logging.getLogger("grpc").warning("another line of grpc's")
    assert "another line of grpc's" in stderr.getvalue()
    assert (
        "s3cr3t" not in stderr.getvalue()
        and "Traceback" not in stderr.getvalue()
        and "ExecuteBatchError" not in stderr.getvalue()
    )


async def serve_odd_headers(folder: Path, port: int) -> None:
    async with serving(folder, port):
        await send(port, b"/tasuki.v1.MetricsService/GetMetrics", {b"grpc-timeout": b"x", b"grpc-encoding": b"x"})


def run_apart(function: str, folder: Path, port: int) -> str:
    """Runs a function of this module in another process, as a service; returns its stderr."""
    program = (
        f"import asyncio, pathlib; from tests.integration.test_port_server import {function} as run; "
        f"asyncio.run(run(pathlib.Path({str(folder)!r}), {port}))"
    )
    # grpc reads its verbosity when it is loaded
    environment = service_environment({name: value for name, value in ENVIRONMENT.items() if name != "GRPC_VERBOSITY"})
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_a_header_that_grpc_cannot_parse_is_not_logged(tmp_path: Path, unused_tcp_port: int) -> None:
    assert "Error parsing" not in run_apart("serve_odd_headers", tmp_path, unused_tcp_port)


async def serve_until_a_path_ends_it(folder: Path, port: int) -> None:
    cygrpc.AioServer = cygrpc.AioServer.__base__  # grpcio's own
    async with serving(folder, port) as server:
        stop = asyncio.Event()
        running = asyncio.create_task(server.run(stop, grace_s=0))
        async with open_channel(f"127.0.0.1:{port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            await watch.read()  # a call that goes on
            await send(port, b"/x/y\xff")
            with pytest.raises(ServiceFailed, match="UnicodeDecodeError"):
                await asyncio.wait_for(running, 30)
        assert stop.is_set() and not (folder / "a.sock").exists()


def test_a_service_whose_server_grpcio_has_ended_ends_too(tmp_path: Path, unused_tcp_port: int) -> None:
    run_apart("serve_until_a_path_ends_it", tmp_path, unused_tcp_port)  # grpcio corrupts the memory of the process


async def wait_until_served(target: str) -> None:
    async with asyncio.timeout(60.0):
        while True:
            with suppress(grpc.RpcError):  # until it notices the end of the calls
                return await check(target)


async def test_unfinished_messages_are_held_for_so_many_calls_and_the_socket_answers(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    max_calls, target = 8, f"127.0.0.1:{unused_tcp_port}"
    async with serving(tmp_path, unused_tcp_port, max_calls=max_calls) as server, open_channel(target) as channel:
        calls = [channel.stream_unary(f"/{NAME}/OptimStep")(timeout=60) for _ in range(3 * max_calls)]  # which send nothing
        refused, held = await asyncio.wait([asyncio.create_task(call.code()) for call in calls], timeout=5.0)
        assert len(held) == max_calls and {task.result() for task in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await check(server.target)
        with pytest.raises(grpc.RpcError) as beyond:
            await check(target)
        assert from_rpc_error(beyond.value).reason == "BUSY"
        for call in calls:
            call.cancel()
        await wait_until_served(target)
