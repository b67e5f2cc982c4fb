"""The dashboard's data, refreshed every second by a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.paths import RUN_CONFIG, log_path
from tasuki.config.schema import NodeConfig
from tasuki.dashboard.journal import JournalTail, page
from tasuki.dashboard.logs import PROCESSES, RestartLogs, read_logs
from tasuki.dashboard.memory import MemoryTimeline, read_plan
from tasuki.dashboard.places import RunPlace, read_settings, read_summary
from tasuki.dashboard.samples import TokenTexts, compare, list_steps, read_sample, read_step
from tasuki.dashboard.steps import StepColumns, draw, thinned
from tasuki.node.node_snapshot import NodeReader, as_dict
from tasuki.runs.progress import progress_path, read_progress
from tasuki.wire.errors import TasukiError

_POLL_S = 2.0
"""A stream of all changes would cost a node with short steps more."""


class NodeFollower:
    """Follows a node with a thread. Calls `tell` when something has changed."""

    def __init__(self, config_path: Callable[[], Path | None], tell: Callable[[], None]) -> None:
        """config_path: of the node to follow now; None if there is none."""
        self._config_path, self._tell = config_path, tell
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._reader: NodeReader | None = None
        self._state: dict[str, Any] = {}
        self._is_silent = False
        self._note = "no node runs here"
        self._thread = threading.Thread(target=self._poll, name="tasuki-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.__exit__()
        self._thread.join(_POLL_S)

    def read(self) -> dict[str, Any]:
        """The current state. is_live: whether the coordinator has answered; is_silent: whether it has not, although a node runs."""
        with self._lock:
            return {"is_live": bool(self._state), "is_silent": self._is_silent, "note": self._note, **self._state}

    def _poll(self) -> None:
        while not self._stop.is_set():
            if (path := self._config_path()) is None:
                self._lose("no node runs here")
            else:
                self._follow(path)
            self._stop.wait(_POLL_S)

    def _follow(self, path: Path) -> None:
        """Follows the node until it is gone."""
        try:
            with NodeReader(load_config(path)) as reader:
                with self._lock:
                    self._reader = reader
                while not self._stop.is_set() and self._config_path() == path:
                    self._take(as_dict(reader.read_states()))
                    self._stop.wait(_POLL_S)
        except (TasukiError, OSError, ValueError) as error:  # ValueError: the channel was closed by `close`
            self._lose(str(error))
        finally:
            with self._lock:
                self._reader = None

    def _take(self, state: dict[str, Any]) -> None:
        if not state["node"].get("boot_id"):  # only the coordinator knows the node's place
            self._lose(f"the coordinator {state['absent'].get('coordinator', 'does not answer')}", is_silent=True)
            return
        with self._lock:
            is_new = state != self._state
            self._state, self._is_silent, self._note = state, False, ""
        if is_new:
            self._tell()

    def _lose(self, note: str, *, is_silent: bool = False) -> None:
        with self._lock:
            is_new = bool(self._state) or note != self._note
            self._state, self._is_silent, self._note = {}, is_silent, note
        if is_new:
            self._tell()


_LOOK_S = 1.0
_NOWHERE = Path("/nonexistent")

Parts = dict[str, int]
"""Change counters of each part: run, steps, samples, changeovers, memory, node, log, progress."""


class Feed:
    """Reads files and, if a node runs, its coordinator. Everything but `start` and `close` is thread-safe."""

    def __init__(self, place: Callable[[], RunPlace], *, others: Sequence[Path] = ()) -> None:
        """place: returns the run's current location. others: output folders of runs to compare with. Raises PathNotFound."""
        self._find = place
        self._others = [StepColumns(folder) for folder in others]
        self._changing = threading.Lock()
        self._parts: Parts = dict.fromkeys(("run", "steps", "samples", "changeovers", "memory", "node", "log", "progress"), 0)
        self._stop = threading.Event()
        self._answering = threading.Lock()
        """Held for an answer from much data, so that many at once do not need the memory of all."""
        self._settle(place())
        self._node = NodeFollower(self._node_config, lambda: self._tell("node"))
        self._thread = threading.Thread(target=self._look_on, name="tasuki-dashboard", daemon=True)

    def start(self) -> None:
        self._node.start()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._node.close()
        self._thread.join(_LOOK_S * 4)

    def changes(self) -> Parts:
        with self._changing:
            return dict(self._parts)

    def run(self) -> dict[str, Any]:
        """The run's settings and latest metrics."""
        place = self.place
        summary, _ = read_summary(place.output_dir)
        progress = asdict(found) if place.output_dir is not None and (found := read_progress(place.output_dir)) else {}
        is_finite = all(math.isfinite(value) for value in progress.values() if isinstance(value, float))
        run = None if self._config is None else self._config.train or self._config.sft
        return {
            "now": time.time(),
            "progress": progress if progress and is_finite else None,
            "is_supervised": self._config is not None and self._config.sft is not None,
            "num_steps": None if run is None else run.num_steps,
            "others": [str(other.output_dir) for other in self._others],
            "without_update": self._steps.without_update(),
            "output_dir": None if place.output_dir is None else str(place.output_dir),
            "archive": str(place.archive),
            "summary": summary,
            "steps": self._steps.bounds(),
            "last": self._steps.last(),
            "problems": self._problems,
        }

    def node(self) -> dict[str, Any]:
        """The node's current state, with the last duration of each stage."""
        return {**self._node.read(), "last_seconds": self._journal.last_seconds(), "restarts": self._restarts.read()}

    def curves(self, *, first: int, last: int, points: int) -> dict[str, Any]:
        with self._answering:
            found = thinned([self._steps, *self._others], first=first, last=last, points=points)
        charts = draw(found)
        return {
            **{name: value for name, value in found.items() if name != "series"},
            "bounds": self._steps.bounds(),
            "charts": charts,
        }

    def metrics_csv(self) -> str:
        with self._answering:
            return self._steps.csv()

    def changeovers(self, *, before: int | None, limit: int, only_failed: bool) -> dict[str, Any]:
        """Raises InvalidArgument for an unreadable journal."""
        restarts_now = self._restarts.coordinator_restarts_now()
        return page(self.place.journal, before=before, limit=limit, only_failed=only_failed, restarts_now=restarts_now)

    def memory(self, *, changeovers: int) -> dict[str, Any]:
        with self._answering:
            window = self._memory.window(self._journal.copied(), changeovers=changeovers, plan=self._plan)
        return {**window, "plan_problem": self._plan_problem}

    def sample_steps(self) -> dict[str, list[int]]:
        return {"steps": list_steps(self.place.samples), "evaluations": list_steps(self.place.evaluations)}

    def samples(self, step: int, *, contains: str = "") -> dict[str, Any]:
        """Raises PathNotFound, and InvalidArgument for an unreadable file."""
        with self._answering:
            return read_step(self.place.samples, step, contains=contains)

    def compare(self, before: int, after: int) -> dict[str, Any]:
        """Two evaluations. Raises as `samples`."""
        with self._answering:
            return compare(self.place.evaluations, before, after)

    def settings(self) -> dict[str, Any]:
        return read_settings(self.place.output_dir, self._config)

    def log(self, *, only_warnings: bool) -> dict[str, Any]:
        with self._answering:
            return read_logs(self.place.archive, only_warnings=only_warnings)

    def sample(self, step: int, index: int) -> dict[str, Any]:
        """Raises PathNotFound and InvalidArgument."""
        with self._answering:
            return read_sample(self.place.samples, step, index, token_text=self._token_texts())

    def _node_config(self) -> Path | None:
        """Configuration of a node that may be running."""
        return self.place.config if self.place.is_of_node else None

    def _settle(self, place: RunPlace) -> None:
        self.place = place
        self._steps = StepColumns(place.output_dir or _NOWHERE)
        self._journal = JournalTail(place.journal)
        self._restarts = RestartLogs(log_path(place.archive, "supervisor"))
        self._memory = MemoryTimeline(place.memory_record)
        self._tokens: TokenTexts | None = None
        self._problems: list[str] = []
        self._plan: dict[str, Any] | None = None
        self._plan_problem, self._planned_for = "there is no configuration of a node here", None
        self._config = _config_of(place)
        self._samples_time, self._has_new_samples = 0, False
        self._stamps: dict[str, list[tuple[int, int]]] = {}

    def _look_on(self) -> None:
        while not self._stop.is_set():
            try:
                place = self._find()
            except (TasukiError, OSError):  # the folder is gone, but may come back
                place = self.place
            if place != self.place:
                self._settle(place)
                self._tell(*self._parts)
            if not self._look():
                self._stop.wait(_LOOK_S)

    def _look(self) -> bool:
        """Refreshes everything. Returns whether more may be waiting in a file that is read in parts."""
        advanced = [columns.advance() for columns in (self._steps, *self._others)]
        has_steps, has_stages = any(advanced), self._journal.advance()
        told = ["run", "steps"] if has_steps else []
        told += ["changeovers", "memory", "node"] if has_stages else []
        told += ["changeovers", "node"] if self._restarts.advance() else []
        if self._see_samples():
            told.append("samples")
        output_dir = self.place.output_dir or _NOWHERE
        watched = {
            "run": [output_dir / "summary.json", output_dir / RUN_CONFIG],
            "progress": [progress_path(output_dir)],
            "log": [log_path(self.place.archive, process) for process in PROCESSES],
        }
        told += [part for part, paths in watched.items() if self._is_changed(part, paths)]
        if "run" in told:  # a resumed run may have another
            self._config = _config_of(self.place)
        if self._make_plan():
            told.append("memory")
        if self._see_problems():
            told.append("run")
        self._tell(*told)
        return has_steps or has_stages

    def _see_samples(self) -> bool:
        """Returns whether the folder has changed, and once more after that: another file may come within a tick of its clock."""
        time_ns = 0
        for folder in (self.place.samples, self.place.evaluations):
            with suppress(OSError):
                time_ns += 0 if folder is None else folder.stat().st_mtime_ns
        had_new, self._has_new_samples = self._has_new_samples, time_ns != self._samples_time
        self._samples_time = time_ns
        return had_new or self._has_new_samples

    def _is_changed(self, part: str, paths: Sequence[Path]) -> bool:
        """Whether one of a part's files has another time or size than at the last call."""
        stamps: list[tuple[int, int]] = []
        for path in paths:
            with suppress(OSError):
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_size))
        before, self._stamps[part] = self._stamps.get(part), stamps
        return stamps != before

    def _see_problems(self) -> bool:
        """Notes which files cannot be read. Returns whether that has changed."""
        _, of_summary = read_summary(self.place.output_dir)
        readers = (self.place, self._journal, self._steps, *self._others, self._restarts, self._memory, self._tokens)
        found = [reader.problem for reader in readers if reader is not None and reader.problem]
        found += [of_summary] if of_summary else []
        is_new, self._problems = found != self._problems, found
        return is_new

    def _make_plan(self) -> bool:
        """Plans once for each configuration and GPU size. Returns whether the plan changed."""
        config, sizes = self.place.config, self._memory.device_bytes()
        if config is None or self._planned_for == (config, sizes):
            return False
        self._planned_for = (config, sizes)
        try:
            self._plan, self._plan_problem = read_plan(config, sizes), ""
        except (TasukiError, OSError) as error:
            self._plan, self._plan_problem = None, str(error)
        return True

    def _token_texts(self) -> TokenTexts:
        if self._tokens is None:
            self._tokens = TokenTexts(_model_of(self.place, self._config))
        return self._tokens

    def _tell(self, *parts: str) -> None:
        if parts:
            with self._changing:
                for part in parts:
                    self._parts[part] += 1


def _config_of(place: RunPlace) -> NodeConfig | None:
    """Configuration of the run, or else of the node; None without a file that can be read."""
    for path in (place.output_dir and place.output_dir / RUN_CONFIG, place.config):
        with suppress(TasukiError, OSError):
            if path is not None:
                return load_config(path)
    return None


def _model_of(place: RunPlace, config: NodeConfig | None) -> Path | None:
    """A folder with the tokenizer: the node's model, or the one left by the run."""
    if config is not None and (config.model.path / "tokenizer.json").is_file():
        return config.model.path
    return None if place.output_dir is None else place.output_dir / "model"
