"""Ports: a caller with a certificate or token works as on the unix socket and is told the ports; nobody else is admitted."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tasuki.client import AsyncClient, Credentials
from tasuki.config.paths import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.v1 import trainer_pb2
from tasuki.v1.coordinator_pb2 import GetStateRequest
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import PeerUnavailable, PermissionDenied
from tests.integration.counting_trainer import command
from tests.integration.port_node import make_certs, make_tokens, mtls, port_config, port_node, tokens, write_secret
from tests.refusal import refused

KINDS = ["certificate", "token over TLS", "token on loopback", "insecure"]


def make_config(kind: str, folder: Path) -> tuple[NodeConfig, Path]:
    secrets_dir = make_tokens(make_certs(folder / "certs"))
    if kind == "certificate":
        return port_config(folder, *mtls(secrets_dir), host="0.0.0.0"), secrets_dir
    if kind == "token over TLS":
        return port_config(folder, *mtls(secrets_dir)[:2], *tokens(secrets_dir), host="0.0.0.0"), secrets_dir
    return port_config(folder, *(["security.insecure=true"] if kind == "insecure" else tokens(secrets_dir))), secrets_dir


@pytest.mark.parametrize("kind", KINDS)
async def test_client_generates_and_trains(tmp_path: Path, kind: str) -> None:
    config, folder = make_config(kind, tmp_path)
    async with port_node(config, folder) as node:
        credentials = None if kind == "insecure" else node.credentials()
        async with AsyncClient(node.target, credentials=credentials) as client:
            assert len(await client.generate([[5, 6]], num_samples=2)) == 2
            assert (await client.trainer_state()).policy_version == 0
            await client.begin_run()


async def test_socket_asks_for_nothing_and_tells_of_sockets(tmp_path: Path) -> None:
    """The scripted coordinator reports ports to everybody; test_port_attacks.py asks the real one."""
    config, folder = make_config("certificate", tmp_path)
    async with port_node(config, folder) as node:
        node.scripted.targets = node_targets(config)
        async with AsyncClient(state_dir=config.state_dir) as client:
            assert len(await client.generate([[5, 6]])) == 1


@pytest.mark.parametrize("method", ["SaveCheckpoint", "ExportModel", "LoadCheckpoint"])
async def test_paths_outside_the_named_folders_are_refused_at_a_port_alone(tmp_path: Path, method: str) -> None:
    config, folder = make_config("certificate", tmp_path)
    inside, outside = f"{config.state_dir}/checkpoints/step-1", f"{tmp_path}/step-1"

    async def ask(channel, path: str):
        request = getattr(trainer_pb2, f"{method}Request")(command=command("a"), path=path)
        call = getattr(TrainerServiceStub(channel), method)(request, timeout=60)
        return await refused(call) if await call.code() is not grpc.StatusCode.OK else None

    async with port_node(config, folder) as node:
        async with open_channel(node.port_of("trainer"), credentials=node.credentials("peer")) as channel:
            denied = await ask(channel, outside)
            assert isinstance(denied, PermissionDenied)
            assert denied.metadata["key"] == ("paths.read" if method == "LoadCheckpoint" else "paths.write")
            assert not isinstance(await ask(channel, inside), PermissionDenied)
        async with open_channel(node_targets(config)["trainer"]) as channel:
            assert not isinstance(await ask(channel, outside), PermissionDenied)


async def test_role_by_the_table_and_taken_away_in_the_middle_of_a_watch(tmp_path: Path) -> None:
    folder = make_certs(tmp_path / "certs")
    roles = tmp_path / "roles.toml"
    roles.write_text('[certificates]\n"spiffe://tasuki.lab/tasuki/viewer" = "operator"\n')
    config = port_config(tmp_path, *mtls(folder), f"security.callers={roles}")
    async with port_node(config, folder) as node:
        async with open_channel(node.target, credentials=node.credentials("operator")) as channel:
            denied = await refused(CoordinatorServiceStub(channel).GetState(GetStateRequest(), timeout=60))
            assert isinstance(denied, PermissionDenied) and denied.metadata["role"] == ""
        async with AsyncClient(node.target, credentials=node.credentials("viewer")) as client:
            watch = client.watch()
            assert (await anext(watch)).state.epoch == 1
            await client.begin_run()
            write_secret(roles, "# nobody\n")
            async with node.scripted.changed:
                node.scripted.changed.notify_all()
            with pytest.raises(PermissionDenied):
                await asyncio.wait_for(anext(watch), 60)
            with pytest.raises(PermissionDenied):
                await client.state()


async def test_refusal_comes_before_a_message_is_read(tmp_path: Path) -> None:
    config, folder = make_config("token on loopback", tmp_path)
    async with port_node(config, folder) as node, open_channel(node.target) as channel:
        call = channel.stream_unary("/tasuki.v1.CoordinatorService/GetState")()
        # Nothing is sent, and the stream stays open.
        assert (await asyncio.wait_for(call.code(), 60)).name == "UNAUTHENTICATED"


async def test_client_that_does_not_trust_the_node_says_so(tmp_path: Path) -> None:
    config, folder = make_config("certificate", tmp_path)
    elsewhere = make_certs(tmp_path / "elsewhere")
    async with port_node(config, folder) as node:
        wrong_ca = Credentials(ca=elsewhere / "ca.pem", cert=folder / "viewer.pem", key=folder / "viewer.key")
        async with AsyncClient(node.target, credentials=wrong_ca) as client:
            with pytest.raises(PeerUnavailable, match="andshake failed"):
                await client.state()
