"""The dashboard's data, refreshed every second by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.dashboard.journal import JournalTail, page
from tasuki.dashboard.memory import MemoryTimeline, read_plan
from tasuki.dashboard.places import RunPlace, read_summary
from tasuki.dashboard.restarts import RestartLogs
from tasuki.dashboard.samples import TokenTexts, list_steps, read_sample, read_step
from tasuki.dashboard.steps import StepColumns, draw
from tasuki.node.node_snapshot import NodeReader, as_dict
from tasuki.wire.errors import TasukiError

_RETRY_S = 2.0
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
        self._thread.join(_RETRY_S)

    def read(self) -> dict[str, Any]:
        """The current state. is_live: whether the coordinator has answered; is_silent: whether it has not, although a node runs."""
        with self._lock:
            return {"is_live": bool(self._state), "is_silent": self._is_silent, "note": self._note, **self._state}

    def _poll(self) -> None:
        while not self._stop.is_set():
            path = self._config_path()
            if path is None:
                self._lose("no node runs here")
            else:
                self._follow(path)
            self._stop.wait(_RETRY_S)

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
            is_new = {**self._state, "seen": 0} != {**state, "seen": 0}
            self._state, self._is_silent, self._note = {**state, "seen": time.time()}, False, ""
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
"""Change counters of each part: run, steps, samples, changeovers, memory, node."""


class Feed:
    """Reads files and, if a node runs, its coordinator. Everything but `start` and `close` is thread-safe."""

    def __init__(self, place: Callable[[], RunPlace]) -> None:
        """place: returns the run's current location. Raises PathNotFound."""
        self._find = place
        self._changing = threading.Lock()
        self._parts: Parts = dict.fromkeys(("run", "steps", "samples", "changeovers", "memory", "node"), 0)
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
        return {
            "output_dir": None if place.output_dir is None else str(place.output_dir),
            "archive": str(place.archive),
            "summary": summary,
            "settings": _settings_of(self._config),
            "steps": self._steps.bounds(),
            "last": self._steps.last(),
            "problems": self._problems,
        }

    def node(self) -> dict[str, Any]:
        """The node's current state, with the last duration of each stage."""
        journal = self._journal
        told = {"events": journal.events(), "last_seconds": journal.last_seconds(), "restarts": self.restarts()}
        return {**self._node.read(), **told}

    def curves(self, *, first: int, last: int, points: int) -> dict[str, Any]:
        with self._answering:
            thinned = self._steps.thinned(first=first, last=last, points=points)
        return {"steps": thinned["steps"], "bucket": thinned["bucket"], "bounds": self._steps.bounds(), "charts": draw(thinned)}

    def changeovers(self, *, before: int | None, limit: int, only_failed: bool) -> dict[str, Any]:
        """Raises InvalidArgument for an unreadable journal."""
        restarts_now = self._restarts.coordinator_restarts_now()
        return page(self.place.journal, before=before, limit=limit, only_failed=only_failed, restarts_now=restarts_now)

    def changeover_chart(self, *, points: int) -> dict[str, Any]:
        with self._answering:
            return self._journal.seconds_by_changeover(points=points)

    def restarts(self) -> dict[str, Any]:
        return self._restarts.read()

    def memory(self, *, changeovers: int) -> dict[str, Any]:
        with self._answering:
            window = self._memory.window(self._journal.copied(), changeovers=changeovers, plan=self._plan)
        return {**window, "plan_problem": self._plan_problem}

    def sample_steps(self) -> list[int]:
        return list_steps(self.place.samples)

    def samples(self, step: int) -> dict[str, Any]:
        """Raises PathNotFound, and InvalidArgument for an unreadable file."""
        with self._answering:
            return read_step(self.place.samples, step)

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
        self._restarts = RestartLogs(place.supervisor_log)
        self._memory = MemoryTimeline(place.memory_record)
        self._tokens: TokenTexts | None = None
        self._problems: list[str] = []
        self._plan: dict[str, Any] | None = None
        self._plan_problem, self._planned_for = "there is no configuration of a node here", None
        self._config = _config_of(place.config)
        self._samples_time, self._has_new_samples = 0, False

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
        has_steps, has_stages = self._steps.advance(), self._journal.advance()
        told = ["run", "steps"] if has_steps else []
        told += ["changeovers", "memory", "node"] if has_stages else []
        told += ["changeovers", "node"] if self._restarts.advance() else []
        if self._see_samples():
            told.append("samples")
        if self._make_plan():
            told.append("memory")
        if self._see_problems():
            told.append("run")
        self._tell(*told)
        return has_steps or has_stages

    def _see_samples(self) -> bool:
        """Returns whether the folder has changed, and once more after that: another file may come within a tick of its clock."""
        folder = self.place.samples
        try:
            time_ns = 0 if folder is None else folder.stat().st_mtime_ns
        except OSError:
            time_ns = 0
        had_new, self._has_new_samples = self._has_new_samples, time_ns != self._samples_time
        self._samples_time = time_ns
        return had_new or self._has_new_samples

    def _see_problems(self) -> bool:
        """Notes which files cannot be read. Returns whether that has changed."""
        _, of_summary = read_summary(self.place.output_dir)
        readers = (self.place, self._journal, self._steps, self._restarts, self._memory, self._tokens)
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


def _config_of(path: Path | None) -> NodeConfig | None:
    """None without a file that can be read."""
    try:
        return None if path is None else load_config(path)
    except (TasukiError, OSError):
        return None


def _model_of(place: RunPlace, config: NodeConfig | None) -> Path | None:
    """A folder with the tokenizer: the node's model, or the one left by the run."""
    if config is not None and (config.model.path / "tokenizer.json").is_file():
        return config.model.path
    return None if place.output_dir is None else place.output_dir / "model"


def _settings_of(config: NodeConfig | None) -> dict[str, Any]:
    """The main settings of a node's configuration."""
    return (
        {}
        if config is None
        else {
            "model": config.model.path.name,
            "device": config.device,
            "trainer_ranks": config.trainer.num_ranks,
            "engines": f"{config.dp_size} x TP {config.rollout.tp_size}",
        }
    )
