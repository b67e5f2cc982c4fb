"""Calls that end before their service handles them."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from tasuki.config.security_schema import CallerRole
from tasuki.rpc.access import Access, ClientPaths, TokenCallers
from tasuki.rpc.logs import is_not_by_callers
from tasuki.rpc.port import Port
from tasuki.rpc.server import RpcServer
from tasuki.v1 import trainer_pb2_grpc
from tasuki.wire.channel import open_channel
from tests.integration.counting_trainer import NAME, CountingTrainer
from tests.integration.port_node import write_secret


@pytest.mark.parametrize("header", ["stranger", "known"])
async def test_calls_that_have_ended_leave_no_traceback_and_count_as_no_error(
    tmp_path: Path, unused_tcp_port: int, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    caplog.set_level(logging.INFO)
    write_secret(tmp_path / "token", "a" * 64)
    callers = TokenCallers({CallerRole.VIEWER: tmp_path / "token"})
    access = Access(callers, ClientPaths(state_dir=tmp_path, write=(), read=()))
    port = Port(target=f"127.0.0.1:{unused_tcp_port}", access=access, credentials=None)
    server = RpcServer(service="trainer", target=f"unix:{tmp_path}/a.sock", port=port)
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, CountingTrainer(), NAME)
    await server.start()
    metadata = (("authorization", f"Bearer {'a' * 64}"),) if header == "known" else ()
    async with open_channel(port.target) as channel:
        watch = channel.unary_unary("/tasuki.v1.MetricsService/GetMetrics")

        async def call() -> None:
            with suppress(grpc.aio.AioRpcError):
                await watch(b"", timeout=0.05, metadata=metadata)

        for _ in range(4):
            await asyncio.gather(*(call() for _ in range(250)))
    await server.stop(grace_s=0)
    counts = re.findall(r'grpc_server_handled_total\{grpc_code="(\w+)".* (\d+\.0)\n', generate_latest(server.registry).decode())
    assert not {code for code, count in counts if count != "0.0"} & {"Internal", "Unknown"}
    logged = [record for record in caplog.records if is_not_by_callers(record)]
    assert not [record.exc_info for record in logged if record.exc_info]
    assert len(logged) < 500
