"""`tasuki watch`: follows a running node, redrawn on a terminal, otherwise one line per event."""

from __future__ import annotations

import sys
import threading

import grpc
from rich.console import Console
from rich.live import Live

from tasuki.cli.node_tables import draw, event_line, phase_name
from tasuki.config.schema import NodeConfig
from tasuki.supervisor.exit_report import is_requested, read_exit_report
from tasuki.supervisor.node_snapshot import NodeReader
from tasuki.supervisor.post_mortem import has_ended, why_it_ended
from tasuki.v1 import coordinator_pb2
from tasuki.wire.errors import TasukiError
from tasuki.wire.printable import printable

_REDRAW_S = 0.5


def watch(config: NodeConfig) -> int:
    """Follows the node until Ctrl-C, even while services restart. Returns 0 if someone stops it; 1, with the reason, if it ends
    unexpectedly. Raises NodeDown if none runs.
    """
    console = Console()
    with NodeReader(config) as reader:
        reader.read()
        follow = _draw if console.is_terminal else _list
        while True:
            follow(reader, console)
            if has_ended(config, within_s=_REDRAW_S):
                break
    report = read_exit_report(config.state_dir)
    error = why_it_ended(config)
    text = f"tasuki: {error.message}" if is_requested(report) else f"tasuki: error {error.reason}: {error.message}"
    sys.stderr.write(f"{printable(text)}\n")
    return 0 if is_requested(report) else 1


def _draw(reader: NodeReader, console: Console) -> None:
    """Returns once the node seems to be gone."""
    pause = threading.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not pause.wait(_REDRAW_S):
            try:
                live.update(draw(reader.read()), refresh=True)
            except TasukiError:
                return


def _list(reader: NodeReader, console: Console) -> None:
    """Prints lines as they happen, flushed so that a pipe gets them. Returns once the coordinator goes away."""
    stream = reader.coordinator.WatchState(coordinator_pb2.WatchStateRequest())
    try:
        for response in stream:
            state = response.state
            line = (
                event_line(response.event) if response.HasField("event") else f"{phase_name(state.phase)}, epoch {state.epoch}"
            )
            sys.stdout.write(f"{printable(line)}\n")
            sys.stdout.flush()
    except grpc.RpcError:
        return
