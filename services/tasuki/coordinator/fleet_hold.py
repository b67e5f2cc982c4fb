"""Orders commands of the node's fleet: a command sent earlier is never executed after a later one."""

from __future__ import annotations

from tasuki.coordinator.journal import Journal
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.errors import StaleEpoch, StaleSequence


class FleetHold:
    """Attempt and epoch outlive this process in the journal. FleetFence refuses callers beside the fleet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sequence = 0
        """Sequence of the fleet's last command to this process; connections to an earlier one are closed."""

    def check(self, command: FleetCommand) -> None:
        """Adopts the command's numbers as the highest.

        Raises StaleEpoch for an earlier life of the fleet, StaleSequence for a command older than the last, and DiskFull.
        """
        self._check(command, least=self._sequence + 1)

    def check_look(self, command: FleetCommand) -> None:
        """Checks a look as `check` does, but accepts the last number again: the channel repeats an interrupted read."""
        self._check(command, least=self._sequence)

    def _check(self, command: FleetCommand, *, least: int) -> None:
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
        elif command.sequence < least:
            text = f"command {command.sequence} of the fleet comes after {self._sequence}"
            raise StaleSequence(text, sequence=command.sequence, current_sequence=self._sequence)
        self._sequence = command.sequence
