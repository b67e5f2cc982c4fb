"""A real coordinator on a port: after garbage, slow connections and refusals it still works as before."""

import asyncio
import itertools
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tasuki.client import AsyncClient, Credentials, Phase
from tasuki.config.paths import node_targets
from tasuki.v1.types_pb2 import PHASE_ROLLOUT, PHASE_TRAIN
from tasuki.wire.channel import open_channel
from tests.extent import IS_WHOLE
from tests.integration.coordinator_process import Node, running_node
from tests.integration.mutations import mutated_calls
from tests.integration.port_node import certificate, make_certs, make_tokens, mtls, port_config, tokens
from tests.integration.raw_calls import answers
from tests.limits import limit_s

NUM_MUTATIONS = 10_000 if IS_WHOLE else 2_000
NUM_SLOW = 500
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,  # for a field that only a peer may set
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # of a watch, or a changeover, on a busy machine
}
"""Status codes with which any message may be answered."""


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PLAIN = (b"", b"\x16\x03\x01\x02\x00\x01", _PREFACE, os.urandom(50))


@contextmanager
def slow_connections(port: int, ca: Path, *, num: int) -> Iterator[list[socket.socket]]:
    """Opens half-open TLS connections: silent, in the middle of a handshake, with garbage, or with nothing after the handshake."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    opened: list[socket.socket] = []
    try:
        for number in range(num):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            if number % 10 < 8:
                connection.sendall(_PLAIN[number % 4])
            else:
                connection = context.wrap_socket(connection, server_hostname="localhost")
                with suppress(OSError):  # a port that requires a certificate has closed it already
                    connection.sendall(_PREFACE[:10] if number % 10 == 8 else _PREFACE)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


@pytest.fixture
async def certs_node(tmp_path: Path) -> AsyncIterator[tuple[Node, Path]]:
    """Starts a coordinator with certificates; also yields their folder."""
    folder = make_certs(tmp_path / "certs")
    async with running_node(port_config(tmp_path, *mtls(folder), host="0.0.0.0")) as node:
        yield node, folder


@pytest.fixture
async def tokens_node(tmp_path: Path) -> AsyncIterator[tuple[Node, Path]]:
    """Starts a coordinator with TLS and tokens, so that anybody can open a connection."""
    folder = make_tokens(make_certs(tmp_path / "certs"))
    async with running_node(port_config(tmp_path, *mtls(folder)[:2], *tokens(folder))) as node:
        yield node, folder


def port_of(node: Node, service: str) -> int:
    return int(node.config.port_targets[service].rpartition(":")[2])


async def test_client_at_a_port_changes_the_phase_and_is_told_of_ports(certs_node: tuple[Node, Path]) -> None:
    node, folder = certs_node
    async with AsyncClient(f"localhost:{port_of(node, 'coordinator')}", credentials=certificate(folder, "trainer")) as client:
        state = await client.state()
        assert (state.trainer_target, state.rollout_target) == tuple(
            node.config.port_targets[s] for s in ("trainer", "rollout")
        )
        await client.acquire(Phase.ROLLOUT)
        assert (await client.rollout_state()).policy_version == 0
    assert (await node.state()).trainer_target == node_targets(node.config)["trainer"]


@pytest.mark.timeout(120)
async def test_mutated_messages_are_answered_and_break_nothing(certs_node: tuple[Node, Path]) -> None:
    node, folder = certs_node
    before = await node.state()
    calls = itertools.islice(mutated_calls(seed=1, services=frozenset({"CoordinatorService"})), NUM_MUTATIONS)
    target = f"localhost:{port_of(node, 'coordinator')}"
    async with open_channel(target, credentials=certificate(folder, "operator")) as channel:
        codes = await answers(channel, calls)
    assert codes.total() == NUM_MUTATIONS
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > NUM_MUTATIONS / 10
    assert codes.keys() <= ANSWERS, codes
    assert codes[grpc.StatusCode.DEADLINE_EXCEEDED] < NUM_MUTATIONS / 200
    after = await node.settled()
    assert (after.boot_id, after.epoch) == (before.boot_id, before.epoch)
    assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


@pytest.mark.timeout(120)
async def test_slow_connections_do_not_keep_others_out(tokens_node: tuple[Node, Path]) -> None:
    node, folder = tokens_node
    port = port_of(node, "coordinator")
    credentials = Credentials(ca=folder / "ca.pem", token_file=folder / "viewer.token")
    opening = slow_connections(port, folder / "ca.pem", num=NUM_SLOW)
    opened = await asyncio.to_thread(opening.__enter__)
    try:
        assert len(opened) == NUM_SLOW
        for _ in range(5):
            started = time.monotonic()
            async with AsyncClient(f"localhost:{port}", credentials=credentials) as client:
                await client.state()
            assert time.monotonic() - started < limit_s(2.0)
        assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT
        make_certs(folder)  # a new certificate arrives in between
        async with AsyncClient(f"localhost:{port}", credentials=credentials) as client:
            await client.state()
    finally:
        opening.__exit__(None, None, None)
    assert (await node.acquire(PHASE_TRAIN))[-1].state.phase == PHASE_TRAIN
