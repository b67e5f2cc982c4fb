"""Runs a node's fleet service: python -m tasuki.fleet --config node.toml

Node 0 leads. Every node joins, sends heartbeats, and exits with FLEET_ENDED after the fleet has ended.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import uuid
from pathlib import Path

import uvloop

from tasuki.config.load import config_argument, load_config
from tasuki.config.lock import StateLock, read_instance
from tasuki.config.paths import REQUESTED_BY, exit_path, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.fleet.lead import lead
from tasuki.fleet.membership import Membership, this_member
from tasuki.node.services import EXIT_FLEET_ENDED
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.port import peer_credentials
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import FleetEnded, InvalidArgument, NotJoined, TasukiError
from tasuki.wire.printable import printable

_log = logging.getLogger("tasuki.fleet")


def main() -> int:
    path = config_argument("fleet")
    configure_logging("fleet")
    try:
        config = load_config(path)
        if config.fleet is None:
            raise InvalidArgument("fleet", "the configuration has no table [fleet]; `tasuki fleet up` writes it")
        with StateLock.take(config.state_dir, name="fleet"):
            uvloop.run(_run(config))
    except TasukiError as error:
        sys.stderr.write(printable(f"tasuki: error {error.reason}: {error.message}") + "\n")
        return EXIT_FLEET_ENDED if isinstance(error, FleetEnded | NotJoined) else 2
    return 0


async def _run(config: NodeConfig) -> None:
    """Runs until SIGTERM or SIGINT. Raises the error that ends the node's membership."""
    assert config.fleet is not None
    socket_dir(config.state_dir)
    heartbeat = Heartbeat(config.state_dir, "fleet")
    heartbeat.beat_in_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    member = await asyncio.to_thread(this_member, config, boot_id=read_instance(config.state_dir).id or uuid.uuid4().hex)
    channel = open_channel(config.fleet.leader, credentials=peer_credentials(config.security))
    membership = Membership(channel, member, config.fleet, start_timeout_s=config.coordinator.stage_timeout_s)
    leads = config.fleet.node_rank == 0
    serving = asyncio.create_task(lead(config, member, stop) if leads else stop.wait())
    joining = asyncio.create_task(membership.run())
    try:
        done, _ = await asyncio.wait({serving, joining}, return_when=asyncio.FIRST_COMPLETED)
        if serving in done and not leads:
            await membership.leave(_why_it_stops(config.state_dir))
    finally:
        stop.set()
        joining.cancel()
        with contextlib.suppress(asyncio.CancelledError, TasukiError):
            await joining
        await channel.close(None)
        heartbeat.close()
        outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
    for task in done:
        task.result()
    if isinstance(outcome, BaseException):
        raise outcome


def _why_it_stops(state_dir: Path) -> str:
    """The reason that the supervisor reports before it ends the services."""
    path = exit_path(state_dir)
    reason = json.loads(path.read_text())["reason"] if path.is_file() else "its supervisor was killed"
    return "was stopped by its operator" if reason.startswith(REQUESTED_BY) else f"has stopped: {reason}"


if __name__ == "__main__":
    sys.exit(main())
