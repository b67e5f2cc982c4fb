"""The dashboard's data, refreshed every second by a thread."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.paths import RUN_CONFIG, journal_path, log_path, memory_record_path
from tasuki.config.schema import NodeConfig
from tasuki.dashboard.journal import JournalTail, page
from tasuki.dashboard.logs import PROCESSES, RestartLogs
from tasuki.dashboard.memory import MemoryTimeline, read_plan
from tasuki.dashboard.places import RunPlace, read_settings, read_summary
from tasuki.dashboard.samples import TokenTexts, read_sample
from tasuki.dashboard.steps import StepColumns, draw, thinned
from tasuki.node.node_snapshot import NodeReader, as_dict
from tasuki.runs.progress import progress_path, read_progress
from tasuki.wire.errors import TasukiError

_POLL_S = 2.0
"""A stream of all changes would cost a node with short steps more."""


class NodeFollower:
    """Follows a node with a thread. Calls `tell` when something has changed."""

    def __init__(self, place: Callable[[], RunPlace], tell: Callable[[], None]) -> None:
        """place: returns the run's current location."""
        self._place, self._tell = place, tell
        self._stop = threading.Event()
        self._state = self._without_node("no node runs here")
        self._thread = threading.Thread(target=self._poll, name="tasuki-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_POLL_S)

    def read(self) -> dict[str, Any]:
        """The current state. is_live: whether the coordinator has answered; is_silent: whether it has not, although a node runs."""
        return self._state

    def _poll(self) -> None:
        while not self._stop.is_set():
            state = self._ask()
            if state != self._state:
                self._state = state
                self._tell()
            self._stop.wait(_POLL_S)

    def _ask(self) -> dict[str, Any]:
        place = self._place()
        try:
            config = None if place.config is None else load_config(place.config)
            if config is None or not place.is_on(config.state_dir):
                return self._without_node("no node runs here")
            with NodeReader(config) as reader:
                state: dict[str, Any] = as_dict(reader.read_states())
        except (TasukiError, OSError) as error:
            return self._without_node(str(error))
        if state["node"].get("boot_id"):
            return {"is_live": True, "is_silent": False, "note": "", **state}
        why = state["absent"].get("coordinator", "does not answer")  # only the coordinator knows the node's place
        return self._without_node(f"the coordinator {why}", is_silent=True)

    @staticmethod
    def _without_node(note: str, *, is_silent: bool = False) -> dict[str, Any]:
        return {"is_live": False, "is_silent": is_silent, "note": note}


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
        self._settle(place())
        self._node = NodeFollower(lambda: self.place, lambda: self._tell("node"))
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
        progress = None if place.output_dir is None else read_progress(place.output_dir)
        run = None if self._config is None else self._config.train or self._config.sft
        return {
            "now": time.time(),
            "progress": None if progress is None else asdict(progress),
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
        found = thinned([self._steps, *self._others], first=first, last=last, points=points)
        charts = draw(found.pop("series"), found["constants"])
        return {**found, "bounds": self._steps.bounds(), "charts": charts}

    def changeovers(self, *, before: int | None, limit: int, only_failed: bool) -> dict[str, Any]:
        """Raises InvalidArgument for an unreadable journal."""
        restarts_now = self._restarts.coordinator_restarts_now()
        return page(
            journal_path(self.place.archive), before=before, limit=limit, only_failed=only_failed, restarts_now=restarts_now
        )

    def memory(self, *, changeovers: int) -> dict[str, Any]:
        window = self._memory.window(self._journal.finished_stages(changeovers=changeovers), plan=self._plan)
        return {**window, "plan_problem": self._plan_problem}

    def settings(self) -> dict[str, Any]:
        return read_settings(self.place.output_dir, self._config)

    def sample(self, step: int, index: int) -> dict[str, Any]:
        """Raises PathNotFound and InvalidArgument."""
        if self._tokens is None:
            self._tokens = TokenTexts(_model_of(self.place, self._config))
        return read_sample(self.place.samples, step, index, token_text=self._tokens)

    def _settle(self, place: RunPlace) -> None:
        self.place = place
        self._steps = StepColumns(place.output_dir or _NOWHERE)
        self._journal = JournalTail(journal_path(place.archive))
        self._restarts = RestartLogs(log_path(place.archive, "supervisor"))
        self._memory = MemoryTimeline(memory_record_path(place.archive))
        self._tokens: TokenTexts | None = None
        self._problems: list[str] = []
        self._plan: dict[str, Any] | None = None
        self._plan_problem, self._planned_for = "there is no configuration of a node here", None
        self._config = _config_of(place)
        self._stamps: dict[str, tuple[list[tuple[int, int]], bool]] = {}

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
        has_steps, has_stages, has_memory = any(advanced), self._journal.advance(), self._memory.advance()
        told = ["run", "steps"] if has_steps else []
        told += ["changeovers", "memory", "node"] if has_stages else []
        told += ["changeovers", "node"] if self._restarts.advance() else []
        output_dir = self.place.output_dir or _NOWHERE
        watched = {
            "run": [output_dir / "summary.json", output_dir / RUN_CONFIG],
            "progress": [progress_path(output_dir)],
            "samples": [folder for folder in (self.place.samples, self.place.evaluations) if folder is not None],
            "log": [log_path(self.place.archive, process) for process in PROCESSES],
        }
        told += [part for part, paths in watched.items() if self._is_changed(part, paths)]
        if "run" in told:  # a resumed run may have another
            self._config = _config_of(self.place)
        if self._make_plan() or has_memory:
            told.append("memory")
        _, of_summary = read_summary(self.place.output_dir)
        readers = (self.place, self._journal, self._steps, *self._others, self._restarts, self._memory, self._tokens)
        problems = [reader.problem for reader in readers if reader is not None and reader.problem]
        problems += [of_summary] if of_summary else []
        if problems != self._problems:
            self._problems = problems
            told.append("run")
        self._tell(*told)
        return has_steps

    def _is_changed(self, part: str, paths: Sequence[Path]) -> bool:
        """Whether one of a part's files has another time or size, or had at the last call: more may come within a tick of the clock."""
        stamps: list[tuple[int, int]] = []
        for path in paths:
            with suppress(OSError):
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_size))
        before, had_new = self._stamps.get(part, ([], False))
        self._stamps[part] = stamps, stamps != before
        return had_new or stamps != before

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
