"""The leader's port of a fleet in a thread of the test, with nothing but the store of the trainers' ranks."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasuki.config.load import load_config
from tasuki.config.schema import FleetConfig
from tasuki.fleet.rank_store import RankStoreServicer
from tasuki.rpc.port import port_of
from tasuki.rpc.server import RpcServer
from tasuki.v1.rank_store_pb2_grpc import add_RankStoreServiceServicer_to_server
from tests.integration.port_node import make_certs, mtls
from tests.ports import free_port

FLEET = "lab"
"""Name of the fleet."""


@dataclass(frozen=True)
class FleetPort:
    """certs: folder of certificates, as `tasuki certs` makes them."""

    leader: str
    certs: Path
    num_nodes: int

    def fleet(self, node_rank: int, *, attempt: int = 0) -> FleetConfig:
        return FleetConfig(
            name=FLEET, num_nodes=self.num_nodes, node_rank=node_rank, leader=self.leader, attempt=attempt, interface="lo"
        )

    def tables(self, node_rank: int, *, interface: str = "lo") -> str:
        """Returns the tables [fleet] and [security] of a node."""
        security = "\n".join(f'{key} = "{path}"' for key, path in self.files().items())
        fleet = f'name = "{FLEET}"\nnum_nodes = {self.num_nodes}\nnode_rank = {node_rank}\nleader = "{self.leader}"'
        return f'[fleet]\n{fleet}\ninterface = "{interface}"\n[security]\n{security}\n'

    def files(self) -> dict[str, Path]:
        """Returns the node's files, by their keys in [security]."""
        return {key.removeprefix("security."): Path(path) for key, path in (each.split("=") for each in mtls(self.certs))}


@contextmanager
def fleet_port(folder: Path, *, num_nodes: int, host: str = "localhost", attempt: int = 0) -> Iterator[FleetPort]:
    """Serves with mTLS until the block ends. folder: receives the certificates."""
    folder.mkdir(parents=True, exist_ok=True)
    certs = make_certs(folder / "certs", host=host, is_fleet=True)
    port = FleetPort(f"{host}:{free_port()}", certs, num_nodes)
    file = folder / "leader.toml"
    file.write_text(f'state_dir = "{folder}/leader"\n[model]\npath = "model"\n')
    bound = port.leader.replace("localhost", "127.0.0.1")
    config = load_config(file, overrides=[*mtls(certs), f"listen={bound}"])
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        server = RpcServer(service="fleet", target=f"unix:{folder}/fleet.sock", port=port_of(config, "coordinator"))
        servicer = RankStoreServicer(fleet=FLEET, attempt=attempt, num_nodes=num_nodes)
        server.add(add_RankStoreServiceServicer_to_server, servicer, "tasuki.v1.RankStoreService")
        await server.start()
        started.set()
        await asyncio.to_thread(stop.wait)
        await server.stop(grace_s=0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield port
    finally:
        stop.set()
        thread.join(20)
