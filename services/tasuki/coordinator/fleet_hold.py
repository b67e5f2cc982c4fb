"""Fences commands of the node's fleet: a command sent earlier is never executed after a later one."""

from __future__ import annotations

from tasuki.config.fleet_schema import FleetConfig
from tasuki.coordinator.journal import Journal
from tasuki.rpc.fleet_caller import check_command
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import InvalidArgument, StaleEpoch, StaleSequence


class FleetHold:
    """config: None for a node without a fleet. Attempt and epoch outlive this process in the journal."""

    def __init__(self, config: FleetConfig | None, journal: Journal) -> None:
        self._config, self._journal = config, journal
        self._sequence = 0
        """Sequence of the fleet's last command to this process; connections to an earlier one are closed."""

    def check(self, command: FleetCommand | None) -> None:
        """Adopts the command's numbers as the highest.

        Raises HeldByFleet for a caller other than the fleet, StaleEpoch for its earlier life or another attempt, StaleSequence for a
        command older than the last, InvalidArgument if the node belongs to no fleet, and DiskFull.
        """
        if not self._is_new(command):
            raise self._late(command)

    def check_look(self, command: FleetCommand) -> None:
        """Checks a look as `check` does, but accepts the last number again: the channel repeats an interrupted read."""
        if not self._is_new(command) and command.sequence < self._sequence:
            raise self._late(command)

    def _late(self, command: FleetCommand | None) -> StaleSequence:
        assert command is not None
        text = f"command {command.sequence} of the fleet comes after {self._sequence}"
        return StaleSequence(text, sequence=command.sequence, current_sequence=self._sequence)

    def _is_new(self, command: FleetCommand | None) -> bool:
        """Adopts the numbers unless the sequence was seen before. Raises as `check`, except StaleSequence."""
        if self._config is None:
            if command is not None:
                raise InvalidArgument("fleet", f"this node belongs to no fleet, and is called by {command.name!r}; set [fleet]")
            return True
        check_command(self._config, command)
        assert command is not None
        given, known = (command.attempt, command.epoch), self._journal.fleet_epoch(command.name)
        if given < known:
            raise StaleEpoch(
                f"attempt {given[0]} of fleet {command.name!r} in its life {given[1]} is over: this node has seen attempt {known[0]}, "
                f"life {known[1]}",
                epoch=given[0],
                current_epoch=known[0],
            )
        if given > known:
            self._journal.take_fleet_epoch(command.name, attempt=command.attempt, epoch=command.epoch)
            self._sequence = 0
        if command.sequence <= self._sequence:
            return False
        self._sequence = command.sequence
        return True
