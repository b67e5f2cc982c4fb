"""Ensures that only its fleet commands a node: every service checks each call that changes state."""

from typing import Any

from google.protobuf.message import DecodeError

from tasuki.config.schema import CallerRole, FleetConfig
from tasuki.rpc.methods import Method
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import HeldByFleet, InvalidArgument, PermissionDenied, StaleEpoch

FLEET_KEY = "tasuki-fleet-bin"
"""Metadata of a call that a fleet makes: a FleetCommand."""
_FOR_CLIENTS = (CallerRole.TRAINER, CallerRole.OPERATOR)


def fleet_metadata(command: FleetCommand) -> tuple[tuple[str, bytes], ...]:
    """Metadata that identifies a call of the fleet."""
    return ((FLEET_KEY, command.SerializeToString()),)


class FleetFence:
    """Admits calls of clients to a node without a fleet, and only the fleet's calls to a node of a fleet."""

    def __init__(self, config: FleetConfig | None) -> None:
        self._config = config

    def check(self, method: Method, context: Any, *, role: CallerRole = CallerRole.PEER) -> None:
        """Raises HeldByFleet for a caller outside the fleet, StaleEpoch for another attempt, PermissionDenied below the role peer.

        Any caller may read. Stage commands are for the node's coordinator, which has an epoch.
        """
        if method.role not in _FOR_CLIENTS:
            return
        command = _command(context)
        if self._config is None:
            if command is not None:
                raise InvalidArgument("fleet", f"this node belongs to no fleet, and is called by {command.name!r}; set [fleet]")
            return
        if command is not None and role < CallerRole.PEER:
            raise PermissionDenied(f"{method.name} for a fleet needs the role peer; the caller has {role.label}", needed="peer")
        config = self._config
        if command is None or command.name != config.name:
            who = "a caller beside it" if command is None else f"fleet {command.name!r}"
            raise HeldByFleet(
                f"the node belongs to fleet {config.name!r} and takes no commands from {who}; call the fleet at {config.leader}",
                fleet=config.name,
                address=config.leader,
            )
        if command.attempt != config.attempt:
            raise StaleEpoch(
                f"the fleet is of attempt {command.attempt} of the job, and the node of {config.attempt}; stop the one that was left "
                "behind",
                epoch=command.attempt,
                current_epoch=config.attempt,
            )


def _command(context: Any) -> FleetCommand | None:
    given = [value for key, value in context.invocation_metadata() or () if key == FLEET_KEY]
    if not given:
        return None
    try:
        return FleetCommand.FromString(given[0])
    except (DecodeError, TypeError) as error:
        raise InvalidArgument("fleet", f"the metadata {FLEET_KEY} is no FleetCommand: {error}") from error
