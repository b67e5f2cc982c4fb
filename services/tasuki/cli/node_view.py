"""`tasuki state` and `tasuki watch`: a node's snapshot and events as text."""

import json
import sys
import time
from contextlib import suppress
from datetime import UTC
from pathlib import Path

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasuki.client.progress import ProgressRecord
from tasuki.config.schema import NodeConfig
from tasuki.node.exit_report import has_ended, is_requested, read_exit_report, why_it_ended
from tasuki.node.node_snapshot import NodeReader, NodeSnapshot, as_dict
from tasuki.rpc.process_start import parts_line
from tasuki.runs.progress import node_progress, progress_line
from tasuki.v1 import coordinator_pb2, memory_pb2, types_pb2
from tasuki.wire.errors import TasukiError
from tasuki.wire.printable import printable
from tasuki.wire.stages import MemoryTag, Phase, Stage, StageStatus

_MIB = 1024 * 1024
_REDRAW_S = 0.5
_BAR_WIDTH = 12
_FILE_WIDTH, _LEAST_WIDTH = 140, 100
"""Columns elsewhere than on a terminal, where paths of sockets are rarely folded, and on a narrow one, which wraps a table's lines."""
_STAGES = [stage for stage in types_pb2.Stage.values() if stage != types_pb2.STAGE_UNSPECIFIED]


def draw(snapshot: NodeSnapshot, *, run: ProgressRecord | None = None) -> RenderableType:
    """Renders the whole node, and the run on it, as rows of text, for a terminal or a file."""
    busy = [name for name, usage in _usages(snapshot) if not usage.tags and name not in snapshot.absent]
    note = f"the ranks of {' and '.join(busy)} are busy and do not report their memory" if busy else ""
    return Group(
        _facts(snapshot, run), Text(), _ring(snapshot), Text(), _memory(snapshot), Text(), _devices(snapshot), Text(note)
    )


def event_line(event: coordinator_pb2.StageEvent) -> str:
    """Renders one event as one line: time, changeover, stage, status, and result."""
    moment = event.time.ToDatetime(UTC).astimezone().strftime("%H:%M:%S")
    name = stage_name(event.stage) if event.stage else "changeover"
    status = StageStatus.known(event.status)
    figures = f"{event.seconds:.3f} s, {event.bytes / _MIB:.1f} MiB" if event.seconds else ""
    error = f"{event.error_reason}: {event.error_message}" if event.error_reason else ""
    return "  ".join(part for part in (moment, event.changeover_id, f"{name:<14}", status, figures, error) if part)


def stage_name(stage: types_pb2.Stage.ValueType) -> str:
    return Stage.of(stage) or "UNSPECIFIED"


def phase_name(phase: types_pb2.Phase.ValueType) -> str:
    return Phase.of(phase) or "between phases"


def _facts(snapshot: NodeSnapshot, run: ProgressRecord | None) -> Table:
    node, trainer, rollout = snapshot.node, snapshot.trainer, snapshot.rollout
    served = str(node.policy_version) if node.HasField("policy_version") else "none yet" if node.stage else "unknown"
    health = f"poisoned: {rollout.poison_reason}" if rollout.is_poisoned else f"{rollout.num_running} requests running"
    learned = "unknown" if "trainer" in snapshot.absent else trainer.policy_version
    told = {
        "coordinator": f"{node.num_changeovers} changeovers, epoch {node.epoch}",
        "trainer": f"{trainer.num_ranks} rank{'s' * (trainer.num_ranks != 1)}, {trainer.num_parameters:,} parameters",
        "rollout": f"{rollout.dp_size} x TP {rollout.tp_size}, {health}",
    }
    rows = [
        ("phase", "unknown" if "coordinator" in snapshot.absent else phase_name(node.phase)),
        ("stage", f"{stage_name(node.stage)}, next {stage_name(node.next_stage)}" if node.stage else "unknown"),
        ("policy version", f"trainer {learned}, rollout {served}"),
        *((name, snapshot.absent.get(name, text)) for name, text in told.items()),
        *((f"{name} at", address) for name, address in snapshot.addresses.items()),
        *(
            (f"{name} start", f"{sum(parts.values()):.1f} s: {parts_line(parts)}")
            for name, parts in snapshot.start_seconds.items()
            if parts
        ),
    ]
    if run is not None:
        rows.append(("run", progress_line(run)))
    if snapshot.files_problem:
        rows.append(("not reloaded", snapshot.files_problem))
    if node.last_error:
        rows.append(("last error", node.last_error))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    return table


def _ring(snapshot: NodeSnapshot) -> Table:
    last: dict[int, coordinator_pb2.StageEvent] = {}
    for changeover in reversed(snapshot.changeovers):
        last.update({event.stage: event for event in changeover.stages})
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("", "stage", "last", "seconds", "MiB"):
        table.add_column(heading, justify="right" if heading in ("seconds", "MiB") else "left", no_wrap=True)
    for stage in _STAGES:
        event = last.get(stage)
        status = StageStatus.known(event.status) if event else ""
        seconds, size = (f"{event.seconds:.3f}", f"{event.bytes / _MIB:.1f}") if event else ("", "")
        table.add_row(">" if stage == snapshot.node.stage else "", stage_name(stage), status, seconds, size)
    return table


def _memory(snapshot: NodeSnapshot) -> Table:
    sizes = ("mapped", "of", "kept", "on host")
    table = _sizes_table("MiB", "tag", "device", "", sizes=sizes)
    for service, usage in _usages(snapshot):
        for tag in usage.tags:
            name = MemoryTag.known(tag.tag)
            bar = ProgressBar(total=max(tag.total_bytes, 1), completed=tag.mapped_bytes)
            paused = " (paused)" if tag.is_paused else " (stays)" if tag.stays else ""
            figures = (tag.mapped_bytes, tag.total_bytes, tag.kept_bytes, tag.host_copy_bytes)
            table.add_row(service, name + paused, f"{tag.device} rank {tag.rank}", bar, *map(_mib, figures))
    return table


def _devices(snapshot: NodeSnapshot) -> Table:
    """Each rank's device memory beyond its tags."""
    sizes = ("process", "torch's cache", "others", "free", "of")
    table = _sizes_table("MiB", "seen by", sizes=sizes)
    for service, usage in _usages(snapshot):
        for seen in usage.devices:
            used = (seen.process_bytes, seen.torch_cached_bytes, seen.other_processes_bytes)
            table.add_row(seen.device, f"{service} rank {seen.rank}", *map(_mib, (*used, seen.free_bytes, seen.total_bytes)))
    return table


def _sizes_table(*headings: str, sizes: tuple[str, ...]) -> Table:
    """A table that fits 80 columns even with the sizes of a large GPU."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=bool(heading), max_width=None if heading else _BAR_WIDTH)
    for heading in sizes:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _mib(num_bytes: int) -> str:
    size = num_bytes / _MIB
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}"


def _usages(snapshot: NodeSnapshot) -> list[tuple[str, memory_pb2.GetUsageResponse]]:
    return [("trainer", snapshot.trainer_memory), ("rollout", snapshot.rollout_memory)]


def open_console() -> Console:
    """Console on stdout that cuts no figure of a table."""
    console = Console()
    return Console(width=max(console.width, _LEAST_WIDTH)) if console.is_terminal else Console(width=_FILE_WIDTH)


def print_text(text: RenderableType) -> None:
    """Prints to stdout, elsewhere than on a terminal without trailing spaces."""
    console = open_console()
    if console.is_terminal:
        console.print(text, highlight=False)
        return
    with console.capture() as captured:
        console.print(text, highlight=False)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def show_state(config: NodeConfig, *, as_json: bool, must_serve: bool = False) -> int:
    """Prints the node's state. Raises NodeDown if none runs.

    must_serve: return 1 while a service does not answer.
    """
    with NodeReader(config) as reader:
        snapshot = reader.read()
    if as_json:
        sys.stdout.write(json.dumps(as_dict(snapshot), indent=2) + "\n")
    else:
        print_text(draw(snapshot, run=node_progress(config.state_dir)))
    return 1 if must_serve and snapshot.absent else 0


def watch(config: NodeConfig) -> int:
    """Follows the node until Ctrl-C, even while services restart. Returns 0 if someone stops it; 1, with the reason, if it ends
    unexpectedly. Raises NodeDown if none runs.
    """
    console, state_dir = Console(), config.state_dir
    with NodeReader(config) as reader:
        reader.read()
        while True:
            if console.is_terminal:
                with Live(console=console, screen=True, auto_refresh=False) as live, suppress(TasukiError):
                    while True:
                        time.sleep(_REDRAW_S)
                        live.update(draw(reader.read(), run=node_progress(state_dir)), refresh=True)
            else:
                _list(reader, state_dir)
            if has_ended(config, within_s=_REDRAW_S):
                break
    report = read_exit_report(config.state_dir)
    error = why_it_ended(config)
    text = f"tasuki: {error.message}" if is_requested(report) else f"tasuki: error {error.reason}: {error.message}"
    sys.stderr.write(f"{printable(text)}\n")
    return 0 if is_requested(report) else 1


def _list(reader: NodeReader, state_dir: Path) -> None:
    """Prints lines as they happen, and one for each step of a run, flushed so that a pipe gets them. Returns once the coordinator goes
    away.
    """
    step = -1
    stream = reader.coordinator.WatchState(coordinator_pb2.WatchStateRequest())
    try:
        for response in stream:
            state = response.state
            phase = f"{phase_name(state.phase)}, epoch {state.epoch}"
            line = event_line(response.event) if response.HasField("event") else phase
            sys.stdout.write(f"{printable(line)}\n")
            run = node_progress(state_dir)
            if run is not None and run.step != step:
                step = run.step
                sys.stdout.write(f"{printable(progress_line(run))}\n")
            sys.stdout.flush()
    except grpc.RpcError:
        return
