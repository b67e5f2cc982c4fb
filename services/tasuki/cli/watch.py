"""`tasuki watch`: the node while it runs, drawn anew on a terminal, one line for each event elsewhere."""

from __future__ import annotations

import sys
import threading

import grpc
from rich.console import Console
from rich.live import Live

from tasuki.cli.view import NodeReader, draw, event_line, phase_name
from tasuki.config.schema import NodeConfig
from tasuki.v1 import coordinator_pb2
from tasuki.wire.errors import TasukiError

_REDRAW_S = 0.5


def watch(config: NodeConfig) -> int:
    """Follows the node until Ctrl-C, or until it is stopped. Raises NodeDown when none runs."""
    console = Console()
    with NodeReader(config) as reader:
        reader.read()
        if console.is_terminal:
            _draw(reader, console)
        else:
            _list(reader)
    return 0


def _draw(reader: NodeReader, console: Console) -> None:
    pause = threading.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not pause.wait(_REDRAW_S):
            try:
                live.update(draw(reader.read()), refresh=True)
            except TasukiError:
                return  # the node was stopped while we looked


def _list(reader: NodeReader) -> None:
    """Lines as they happen, each written out at once, so that a pipe gets them."""
    stream = reader.coordinator.WatchState(coordinator_pb2.WatchStateRequest())
    try:
        for response in stream:
            state = response.state
            line = (
                event_line(response.event) if response.HasField("event") else f"{phase_name(state.phase)}, epoch {state.epoch}"
            )
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except grpc.RpcError:
        return  # the node was stopped while we looked
