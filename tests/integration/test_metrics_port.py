"""The metrics address of a node: who may read it, and clients that say nothing."""

import asyncio
import http.client
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.node_metrics import serve_metrics
from tasuki.rpc.port import MAX_CONNECTIONS, check_ports
from tasuki.wire.errors import InvalidArgument
from tests.integration.port_node import admit_tokens, make_certs, make_tokens, mtls, port_config, tokens

TEXT = b"tasuki_phase 1\n"


@asynccontextmanager
async def served(config: NodeConfig, text: bytes = TEXT) -> AsyncIterator[int]:
    """Yields the port."""

    async def answer() -> bytes:
        return text

    task = asyncio.create_task(serve_metrics(config, answer))
    assert config.metrics.listen is not None
    port = int(config.metrics.listen.rpartition(":")[2])
    await wait_until_open(port)
    yield port
    task.cancel()
    await asyncio.wait([task])


async def wait_until_open(port: int) -> None:
    for _ in range(100):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise AssertionError("not served")


def config_of(folder: Path, port: int, *security: str, host: str = "127.0.0.1") -> NodeConfig:
    insecure = () if security else ("security.insecure=true",)
    return port_config(folder, f"metrics.listen={host}:{port}", *security, *insecure)


async def read(
    port: int, path: str = "/metrics", *, tls: ssl.SSLContext | None = None, token: str | None = None, **headers: str
) -> tuple[int, bytes]:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"

    def get() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        if tls is not None:
            connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=tls)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    return await asyncio.to_thread(get)


def tls_of(folder: Path, role: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if role is not None:
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}.key")
    return context


async def test_on_loopback_it_answers_everybody_and_only_this_path(tmp_path: Path, unused_tcp_port: int) -> None:
    async with served(config_of(tmp_path, unused_tcp_port)) as port:
        assert await read(port) == (200, TEXT)
        assert (await read(port, "/metrics?name[]=up"))[0] == 200
        assert (await read(port, "/"))[0] == 404


async def test_on_loopback_a_name_that_was_made_to_lead_here_is_refused(tmp_path: Path, unused_tcp_port: int) -> None:
    async with served(config_of(tmp_path, unused_tcp_port)) as port:
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "10.0.0.1",
            "",
        ):
            status, text = await read(port, Host=host)
            assert (status, text) == (421, b"this server is for names of this machine\n")
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "127.0.0.2", "[::1]:80"):
            assert await read(port, Host=host) == (200, TEXT)


async def test_elsewhere_it_asks_for_a_certificate_with_a_role(tmp_path: Path, unused_tcp_port: int) -> None:
    folder = make_certs(tmp_path / "certs")
    async with served(config_of(tmp_path, unused_tcp_port, *mtls(folder), host="0.0.0.0")) as port:
        for role in ("viewer", "trainer", "operator", "peer"):
            assert await read(port, tls=tls_of(folder, role)) == (200, TEXT)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            await read(port, tls=tls_of(folder))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            await read(port)


async def test_elsewhere_it_asks_for_a_token_which_may_be_taken_away(tmp_path: Path, unused_tcp_port: int) -> None:
    folder = make_tokens(make_certs(tmp_path / "certs"))
    security = [*mtls(folder)[:2], *tokens(folder)]
    async with served(config_of(tmp_path, unused_tcp_port, *security, host="0.0.0.0")) as port:
        token = (folder / "viewer.token").read_text().strip()
        assert await read(port, tls=tls_of(folder), token=token) == (200, TEXT)
        assert (await read(port, tls=tls_of(folder), token="0" * 64))[0] == 401
        assert (await read(port, tls=tls_of(folder)))[0] == 401
        admit_tokens(folder, viewer="1" * 64)
        assert (await read(port, tls=tls_of(folder), token=token))[0] == 401


async def test_a_key_that_every_user_can_read_is_refused_at_the_start_and_while_it_serves(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    folder = make_certs(tmp_path / "certs")
    authority = folder / "ca.pem"
    authority.write_text(f"# Zürich\n{authority.read_text()}", encoding="utf-8")
    config = config_of(tmp_path, unused_tcp_port, *mtls(folder), host="0.0.0.0")
    async with served(config) as port:
        old = (folder / "node.pem").read_text()
        new = make_certs(tmp_path / "new")
        (new / "node.key").chmod(0o644)
        for name in ("node.key", "node.pem"):
            (new / name).rename(folder / name)
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(old)
    alone = load_config(tmp_path / "node.toml", overrides=[f"metrics.listen=0.0.0.0:{unused_tcp_port}", *mtls(folder)])
    with pytest.raises(InvalidArgument, match=r"security.key: .*node.key is open to every user"):
        check_ports(alone)


async def test_silent_connections_are_closed_and_make_room(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.rpc.port.IDLE_TIMEOUT_S", 2.0)
    async with served(config_of(tmp_path, unused_tcp_port)) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS + 8)]
        for one in silent:
            one.settimeout(60)
            assert await asyncio.to_thread(one.recv, 1) == b""
            one.close()
        assert await read(port) == (200, TEXT)
