"""The fleet that commands this node, and how far it has come: nothing that it sent earlier is carried out later."""

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
        """Of the fleet's last command since this process was started; a connection to an earlier one is gone."""

    def check(self, command: FleetCommand | None) -> None:
        """Takes the command's numbers as the highest.

        Raises HeldByFleet for another caller than the fleet, StaleEpoch for an earlier life or another attempt of it, StaleSequence for
        a command that comes after a later one, InvalidArgument when the node belongs to no fleet, and DiskFull.
        """
        if not self._is_new(command):
            raise self._late(command)

    def check_look(self, command: FleetCommand) -> None:
        """As `check`, for a look: the channel repeats a read that was cut off, and the last number may come again."""
        if not self._is_new(command) and command.sequence < self._sequence:
            raise self._late(command)

    def _late(self, command: FleetCommand | None) -> StaleSequence:
        assert command is not None
        text = f"command {command.sequence} of the fleet comes after {self._sequence}"
        return StaleSequence(text, sequence=command.sequence, current_sequence=self._sequence)

    def _is_new(self, command: FleetCommand | None) -> bool:
        """Takes the numbers unless the sequence was seen before. Raises as `check`, but for StaleSequence."""
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
