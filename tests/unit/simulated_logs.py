"""Logs of simulated services: the lines of their command gates, up to the death of each life."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasuki.coordinator.audit.commands import LoggedLife, read_command_log
from tasuki.wire.stages import Service
from tests.unit.simulated_services import SimulatedService

_LOGGER = logging.getLogger("tasuki.rpc")


class SimulatedLogs(logging.Handler):
    """Collects lines from creation until `close`. lives: the services' lives so far, oldest first."""

    def __init__(self, lives: Mapping[Service, Sequence[SimulatedService]]) -> None:
        super().__init__()
        self._lives = lives
        self._lines: dict[str, list[str]] = {}
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        for lives in self._lives.values():
            for life in lives:
                if f" boot_id={life.boot_id} " in line and not life.died.is_set():
                    self._lines.setdefault(life.boot_id, []).append(line)

    def close(self) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.setLevel(self._level)
        super().close()

    def read(self, folder: Path) -> dict[Service, list[LoggedLife]]:
        """Reads the logs as an audit does, by way of files in `folder`."""
        return {service: self._read(folder / f"{service}.log", service) for service in self._lives}

    def _read(self, path: Path, service: Service) -> list[LoggedLife]:
        lines: list[str] = []
        for life in self._lives[service]:
            lines += [f"event=serving service={service}", *self._lines.get(life.boot_id, [])]
        path.write_text("\n".join(lines))
        return read_command_log(path)
