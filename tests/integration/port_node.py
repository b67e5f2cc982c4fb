"""A scripted node whose services listen on ports, with certificates and tokens."""

import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tasuki.cli import certs
from tasuki.client import Credentials
from tasuki.config.load import load_config
from tasuki.config.paths import node_targets, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1 import fleet_pb2_grpc, memory_pb2_grpc, rank_store_pb2_grpc
from tests.integration.scripted_node import ADDERS, ScriptedNode
from tests.ports import free_port

SERVICES = ("coordinator", "trainer", "rollout")
ROLES = ("viewer", "trainer", "operator", "peer")


@dataclass
class PortNode:
    """A scripted node with its configuration and addresses. folder: of the certificates and tokens."""

    config: NodeConfig
    scripted: ScriptedNode
    folder: Path

    @property
    def target(self) -> str:
        """Address of the coordinator's port."""
        return self.port_of("coordinator")

    def port_of(self, service: str) -> str:
        return f"localhost:{self.config.port_targets[service].rpartition(':')[2]}"

    def credentials(self, role: str = "trainer") -> Credentials:
        """Returns credentials with a role's certificate or token."""
        if self.config.security.client_ca is not None:
            return certificate(self.folder, role)
        ca = None if self.config.security.cert is None else self.folder / "ca.pem"
        return Credentials(ca=ca, token_file=self.folder / f"{role}.token")


def certificate(folder: Path, name: str) -> Credentials:
    return Credentials(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}.key")


def make_certs(folder: Path, *, host: str = "localhost", is_fleet: bool = False) -> Path:
    """Makes certificates with `tasuki certs`; returns the folder."""
    assert certs.run(folder, hosts=[host], days=1, is_fleet=is_fleet) == 0
    return folder


def make_tokens(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for role in ROLES:
        write_secret(folder / f"{role}.token", f"{secrets.token_hex(32)}\n")
    admit_tokens(folder)
    return folder


def admit_tokens(folder: Path, **replaced: str) -> None:
    """Writes the node's file of callers: a token for each role. replaced: other tokens, one a line, by role."""
    texts = {role: replaced.get(role, (folder / f"{role}.token").read_text()) for role in ROLES}
    lines = [f'{token} = "{role}"\n' for role, text in texts.items() for token in text.split()]
    write_secret(folder / "callers.toml", "".join(["[tokens]\n", *lines]))


def write_secret(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.rename(path)


def mtls(folder: Path) -> list[str]:
    return [
        f"security.{key}={folder / name}" for key, name in (("cert", "node.pem"), ("key", "node.key"), ("client_ca", "ca.pem"))
    ]


def tokens(folder: Path) -> list[str]:
    return [f"security.callers={folder}/callers.toml"]


def port_config(folder: Path, *overrides: str, host: str = "127.0.0.1") -> NodeConfig:
    """A node with a port for each service. folder: must be new; becomes the state folder's parent."""
    file = folder / "node.toml"
    file.write_text(f'state_dir = "{folder}/state"\n[model]\npath = "model"\n')
    return load_config(file, overrides=[f"listen={host}:{free_port(num=3)}", *overrides])


@asynccontextmanager
async def port_node(config: NodeConfig, folder: Path) -> AsyncIterator[PortNode]:
    """Serves the scripted node through real servers with the real access checks."""
    config.state_dir.mkdir(exist_ok=True)
    socket_dir(config.state_dir)
    node = ScriptedNode(config.state_dir)
    node.targets = config.port_targets
    servers = []
    for name, add in ADDERS.items():
        server = RpcServer(service=name, target=node_targets(config)[name], port=port_of(config, name))
        server.add(add, node, f"tasuki.v1.{name.capitalize()}Service")
        if name != "coordinator":
            memory = memory_pb2_grpc.MemoryServiceServicer()
            server.add(memory_pb2_grpc.add_MemoryServiceServicer_to_server, memory, "tasuki.v1.MemoryService")
        if name == "trainer":  # any of them; really, a fleet's leader serves them
            fleet, store = fleet_pb2_grpc.FleetServiceServicer(), rank_store_pb2_grpc.RankStoreServiceServicer()
            server.add(fleet_pb2_grpc.add_FleetServiceServicer_to_server, fleet, "tasuki.v1.FleetService")
            server.add(rank_store_pb2_grpc.add_RankStoreServiceServicer_to_server, store, "tasuki.v1.RankStoreService")
        await server.start()
        servers.append(server)
    try:
        yield PortNode(config, node, folder)
    finally:
        node.hang.set()
        for server in servers:
            await server.stop(grace_s=0)
        shutil.rmtree(socket_dir(config.state_dir), ignore_errors=True)
