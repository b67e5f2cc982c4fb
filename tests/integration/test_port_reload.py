"""Certificates, authorities and tokens are replaced while calls run: no call is lost, and old credentials stop working."""

import asyncio
import secrets
import time
from pathlib import Path

import grpc
import pytest

from tasuki.client import AsyncClient, Credentials
from tasuki.wire.channel import PORT_OPTIONS, open_channel
from tasuki.wire.errors import PeerUnavailable
from tests.integration.port_node import (
    PortNode,
    admit_tokens,
    make_certs,
    make_tokens,
    mtls,
    port_config,
    port_node,
    tokens,
    write_secret,
)
from tests.integration.raw_calls import code_of
from tests.limits import limit_s

GET_STATE = "/tasuki.v1.CoordinatorService/GetState"
NUM_CALLERS = 8
AGE_MS = 400


class Load:
    """Callers that call without a pause. Any failed call fails the test."""

    def __init__(self, node: PortNode, role: str = "trainer") -> None:
        self.num_calls = 0
        self._stopped = asyncio.Event()
        self._callers = [asyncio.create_task(self._call(node, role)) for _ in range(NUM_CALLERS)]

    async def _call(self, node: PortNode, role: str) -> None:
        async with AsyncClient(node.target, credentials=node.credentials(role)) as client:
            while not self._stopped.is_set():
                await client.trainer_state()
                self.num_calls += 1

    async def after(self, num_calls: int) -> None:
        """Waits until `num_calls` more calls were answered."""
        wanted = self.num_calls + num_calls
        while self.num_calls < wanted and not any(caller.done() for caller in self._callers):
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._callers)


async def test_new_authority_loses_no_call_and_shuts_the_old_one_out(tmp_path: Path) -> None:
    folder, old = make_certs(tmp_path / "certs"), make_certs(tmp_path / "old")
    for name in ("ca", "node", "trainer"):
        (folder / f"{name}.pem").write_bytes((old / f"{name}.pem").read_bytes())
        (folder / f"{name}.key").write_bytes((old / f"{name}.key").read_bytes())
    new = make_certs(tmp_path / "new")

    def put(name: str, *sources: Path) -> None:
        write_secret(folder / name, "".join((source / name).read_text() for source in sources))

    async with port_node(port_config(tmp_path, *mtls(folder)), folder) as node:
        load = Load(node)
        await load.after(100)
        put("ca.pem", old, new)  # both sides trust both
        await load.after(100)
        for name in ("node", "trainer"):
            put(f"{name}.key", new)
            put(f"{name}.pem", new)
        await load.after(100)
        put("ca.pem", new)
        await load.after(100)
        await load.stop()
        shown = Credentials(ca=new / "ca.pem", cert=old / "trainer.pem", key=old / "trainer.key")
        async with open_channel(node.target, credentials=shown) as channel:
            assert await code_of(channel, GET_STATE) is grpc.StatusCode.UNAVAILABLE


async def test_client_that_a_port_refuses_is_asked_about_its_credentials(tmp_path: Path) -> None:
    folder, foreign = make_certs(tmp_path / "certs"), make_certs(tmp_path / "foreign")
    strange = Credentials(ca=folder / "ca.pem", cert=foreign / "trainer.pem", key=foreign / "trainer.key")
    async with port_node(port_config(tmp_path, *mtls(folder)), folder) as node:
        for credentials in (strange, None):
            target = node.target.replace("localhost", "127.0.0.1")
            async with AsyncClient(target, credentials=credentials) as client:
                with pytest.raises(PeerUnavailable, match="is the node up, and does it accept these credentials"):
                    await client.state()


async def test_new_token_loses_no_call_and_the_old_one_cannot_be_replayed(tmp_path: Path) -> None:
    folder = make_tokens(tmp_path / "tokens")
    client_folder = make_tokens(tmp_path / "client")
    old, new = (folder / "trainer.token").read_text(), f"{secrets.token_hex(32)}\n"
    write_secret(client_folder / "trainer.token", old)
    async with port_node(port_config(tmp_path, *tokens(folder)), client_folder) as node:
        load = Load(node)
        await load.after(100)
        admit_tokens(folder, trainer=new + old)  # the node accepts both
        await load.after(100)
        write_secret(client_folder / "trainer.token", new)
        await load.after(100)
        admit_tokens(folder, trainer=new)
        await load.after(100)
        await load.stop()
        async with grpc.aio.insecure_channel(node.target) as channel:
            for token, code in ((old, grpc.StatusCode.UNAUTHENTICATED), (new, grpc.StatusCode.OK)):
                assert await code_of(channel, GET_STATE, metadata=[("authorization", f"Bearer {token.strip()}")]) is code


async def test_connections_that_end_by_their_age_lose_no_call_and_shut_a_lost_authority_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**dict(PORT_OPTIONS), "grpc.max_connection_age_ms": AGE_MS}
    monkeypatch.setattr("tasuki.rpc.server.PORT_OPTIONS", list(options.items()))
    folder, other = make_certs(tmp_path / "certs"), make_certs(tmp_path / "other")
    async with port_node(port_config(tmp_path, *mtls(folder)), folder) as node:
        async with AsyncClient(node.target, credentials=node.credentials()) as client:
            watch = client.watch()
            await anext(watch)
            load, started = Load(node), time.monotonic()
            while time.monotonic() - started < 5 * AGE_MS / 1000:
                await load.after(50)
            await load.stop()
            async with node.scripted.changed:
                node.scripted.changed.notify_all()
            await asyncio.wait_for(anext(watch), 60)  # longer than the maximum age of a connection
            await client.state()
            kept = folder / "kept.pem"
            kept.write_bytes((folder / "ca.pem").read_bytes())
        shown = Credentials(ca=kept, cert=folder / "viewer.pem", key=folder / "viewer.key")
        async with open_channel(node.target, credentials=shown) as channel:
            assert await code_of(channel, GET_STATE) is grpc.StatusCode.OK
            write_secret(folder / "ca.pem", (other / "ca.pem").read_text())
            deadline = time.monotonic() + limit_s(5 * AGE_MS / 1000)
            while (code := await code_of(channel, GET_STATE)) is grpc.StatusCode.OK:
                assert time.monotonic() < deadline, "the connection outlived its authority"
                await asyncio.sleep(0.05)
            assert code is grpc.StatusCode.UNAVAILABLE
