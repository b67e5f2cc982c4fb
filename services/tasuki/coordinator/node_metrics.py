"""All metrics of a node in one text: of coordinator, trainer, rollout and run, and measured and planned memory.

Those of the run are read from the end of its metrics.jsonl.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tasuki.config.gpus import gpus_of
from tasuki.config.paths import training_output_path
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.metrics_tail import MetricsTail, StepFigures
from tasuki.coordinator.node import Node
from tasuki.coordinator.planning import Planning, planned_memory
from tasuki.rpc import metrics
from tasuki.rpc.methods import METHODS
from tasuki.rpc.metrics import joined, of_service
from tasuki.rpc.port import HttpCaller, HttpHandler, HttpPort
from tasuki.v1.coordinator_pb2 import NodeState, PlanRequest, PlanResponse, StageEvent
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.wire.address import is_beyond_loopback
from tasuki.wire.errors import PermissionDenied, TasukiError, Unauthenticated
from tasuki.wire.regular_file import read_path
from tasuki.wire.stages import MemoryTag, Phase, Service, Stage, StageStatus

_STAGE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_READ_TIMEOUT_S = 2.0
_FRESH_S = 1.0
_CHANGEOVER = "CHANGEOVER"
_REWARD, _SECONDS = "reward/", "seconds/"


class NodeMetrics:
    """Reads everything when it is asked, at most once a second. `follow` counts changeovers meanwhile.

    registry: the coordinator's own. Unreadable metrics are left out; memory is reported as last known.
    """

    def __init__(
        self, registry: CollectorRegistry, *, config: NodeConfig, node: Node, journal: Journal, peers: Peers, planning: Planning
    ) -> None:
        self._registry, self._config, self._node = registry, config, node
        self._journal, self._peers, self._planning = journal, peers, planning
        self._planned: PlanResponse | None = None
        gpus = gpus_of(config)
        self._num_gpus = len({*gpus.trainer, *gpus.rollout})
        self._stages: Histogram = metrics.STAGE_SECONDS.histogram(registry, buckets=_STAGE_BUCKETS_S)
        self._changeovers = metrics.CHANGEOVERS.counter(registry)
        self._gpu_seconds = metrics.GPU_SECONDS.counter(registry)
        self._run = RunFigures(config.state_dir)
        self._usages: dict[Service, GetUsageResponse] = {}
        self._turn = asyncio.Lock()
        self._made: tuple[float, bytes] = (float("-inf"), b"")

    async def follow(self) -> None:
        """Counts ended changeovers until the node's watchers are released."""
        with self._node.watchers.watching() as updates:
            while (update := await updates.get()) is not None:
                self._count(update.event)

    async def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        clock = asyncio.get_running_loop()
        async with self._turn:
            if clock.time() - self._made[0] > _FRESH_S:
                self._made = clock.time(), await self._make()
            return self._made[1]

    async def _make(self) -> bytes:
        answers: dict[Service, bytes] = {}
        await asyncio.gather(self._read_run(), self._plan(), *(self._read_service(service, answers) for service in Service))
        own = [*self._state_families(answers), *self._memory_families(), *self._run.families()]
        return await asyncio.to_thread(_whole_text, self._registry, answers, own)

    def _count(self, event: StageEvent) -> None:
        stage, status = Stage.of(event.stage), StageStatus.of(event.status)
        if stage is not None and status is not StageStatus.STARTED:
            self._stages.labels(stage, status).observe(event.seconds)
        elif stage is None and event.changeover_id:
            self._changeovers.labels(self._journal.target_of(event.changeover_id), status).inc()
            self._gpu_seconds.labels("changeover").inc(event.seconds * self._num_gpus)

    async def _read_service(self, service: Service, answers: dict[Service, bytes]) -> None:
        """Reads metrics and memory, this not during a changeover, whose stages would wait for the ranks' answers."""
        try:
            answers[service] = await self._peers.metrics(service, timeout_s=_READ_TIMEOUT_S)
        except TasukiError:
            self._usages.pop(service, None)
            return
        with suppress(TasukiError):
            if not self._node.state().changeover_id:
                self._usages[service] = await self._peers.usage(service)

    async def _plan(self) -> None:
        with suppress(TasukiError):
            self._planned = self._planned or await self._planning.plan(PlanRequest())

    async def _read_run(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await asyncio.to_thread(self._run.read)

    def _state_families(self, answers: Mapping[Service, bytes]) -> Iterable[Metric]:
        up, phase, gpus = metrics.SERVICE_UP.gauges(), metrics.PHASE.gauges(), metrics.GPUS.gauges()
        up.add_metric(["coordinator"], 1)
        for service in Service:
            up.add_metric([service], service in answers)
        now = phase_label(self._node.state())
        for name in (*Phase, _CHANGEOVER):
            phase.add_metric([name], name == now)
        gpus.add_metric([], self._num_gpus)
        return up, phase, gpus

    def _memory_families(self) -> Iterable[Metric]:
        names = metrics.MEMORY_MAPPED, metrics.MEMORY_STAYS, metrics.DEVICE_FREE, metrics.DEVICE_TOTAL
        mapped, staying, free, total = (name.gauges() for name in names)
        sizes: Counter[tuple[str, str, str]] = Counter()
        num_staying: Counter[tuple[str, str, str]] = Counter()
        devices: dict[str, tuple[int, int]] = {}
        for service, usage in self._usages.items():
            for tag in usage.tags:
                key = (service, MemoryTag.of(tag.tag) or "", tag.device)
                sizes[key] += tag.mapped_bytes
                num_staying[key] += tag.stays
            devices |= {device.device: (device.free_bytes, device.total_bytes) for device in usage.devices}
        for key, size in sizes.items():
            mapped.add_metric(key, size)
        for key, num_ranks in num_staying.items():
            staying.add_metric(key, num_ranks)
        for device, (free_bytes, total_bytes) in devices.items():
            free.add_metric([device], free_bytes)
            total.add_metric([device], total_bytes)
        at = Stage.of(self._node.state().stage)
        return mapped, staying, planned_memory(self._planned, at, device=self._config.device), free, total


def phase_label(state: NodeState) -> str:
    """Where the node is, as of `tasuki_phase`; empty while nobody knows, as during its start."""
    is_between = bool(state.stage or state.changeover_id)
    return Phase.of(state.phase) or (_CHANGEOVER if is_between else "")


def _whole_text(registry: CollectorRegistry, answers: Mapping[Service, bytes], own: Sequence[Metric]) -> bytes:
    """Text with one family of each name: of the coordinator's registry, the services' answers and `own`."""
    families = of_service(registry.collect(), "coordinator")
    for service, text in answers.items():
        families += of_service(text_string_to_metric_families(text.decode()), service)
    whole: Any = SimpleNamespace(collect=lambda: joined([*families, *own]))
    return generate_latest(whole)


class RunFigures:
    """Newest figures of the node's last run. Each line of its file is read once."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir, self._reading = state_dir, threading.Lock()
        self._tail = MetricsTail(state_dir)
        self._last = self._scored = self._learned = StepFigures(-1, {}, {})
        """The last step, and the last with an evaluation and with an update."""

    def read(self) -> None:
        """Reads new lines. An incomplete line is left to the next call."""
        if not self._reading.acquire(blocking=False):
            return  # the disk has not answered an earlier call
        try:
            folder = read_path(training_output_path(self._state_dir))
            if folder != self._tail.output_dir:
                self._forget(folder)
            for step in self._tail.read():
                if step.step <= self._last.step:  # the file was replaced
                    self._last = self._scored = self._learned = step
                self._last = step
                self._scored = step if "eval_score" in step.values else self._scored
                self._learned = step if step.metrics else self._learned
        except OSError:
            self._forget(self._state_dir)
        finally:
            self._reading.release()

    def families(self) -> Iterable[GaugeMetricFamily]:
        """Gauges of the newest step that updated weights, and of the newest evaluation."""
        names = (metrics.RUN_STEP, metrics.RUN_REWARD, metrics.RUN_EVAL_SCORE)
        step, reward, score = (name.gauges() for name in names)
        seconds, metric = metrics.RUN_STEP_SECONDS.gauges(), metrics.RUN_METRIC.gauges()
        if self._last.step >= 0:
            step.add_metric([], self._last.step)
        if "eval_score" in self._scored.values:
            score.add_metric([], self._scored.values["eval_score"])
        if learned := self._learned.metrics:
            values = self._learned.values
            for name, value in values.items():
                if name.startswith(_SECONDS):
                    seconds.add_metric([name.removeprefix(_SECONDS)], value)
            for name, value in learned.items():
                metric.add_metric([name], value)
                if name.startswith(_REWARD):
                    reward.add_metric([name.removeprefix(_REWARD)], value)
            if "mean_reward" in values:
                reward.add_metric(["mean"], values["mean_reward"])
        return step, reward, score, seconds, metric

    def _forget(self, folder: Path) -> None:
        self._tail, self._last = MetricsTail(folder), StepFigures(-1, {}, {})
        self._scored = self._learned = self._last


_log = logging.getLogger("tasuki.coordinator")
_METHOD = METHODS["/tasuki.v1.MetricsService/GetMetrics"]
"""Method whose callers may also scrape."""
_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 5.0
Text = Callable[[], Coroutine[Any, Any, bytes]]


async def serve_metrics(config: NodeConfig, text: Text) -> None:
    """Serves until cancelled. An address in use is retried; meanwhile the node only lacks metrics."""
    assert config.metrics.listen is not None
    server, is_told = None, False
    while server is None:
        try:
            server = MetricsServer(config, config.metrics.listen, text, loop=asyncio.get_running_loop())
        except (OSError, TasukiError) as error:
            if not is_told:
                _log.error("event=metrics_not_served listen=%s error=%s", config.metrics.listen, error)
            is_told = True
            await asyncio.sleep(_RETRY_S)
    thread = threading.Thread(target=server.serve_forever, name="tasuki-metrics", daemon=True)
    thread.start()
    _log.info("event=metrics_served listen=%s tls=%s", config.metrics.listen, server.tls is not None)
    try:
        await asyncio.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


class MetricsServer(HttpPort):
    """Answers with the text of the node's metrics."""

    def __init__(self, config: NodeConfig, listen: str, text: Text, *, loop: asyncio.AbstractEventLoop) -> None:
        """Binds the address. Raises OSError if it is unavailable, InvalidArgument naming a key of [security] whose file cannot be used."""
        self._text, self._loop = text, loop
        super().__init__(listen, _Handler, guard=config if is_beyond_loopback(listen) else None)

    def text(self) -> bytes:
        """Text of the metrics, made in the event loop; called from a connection's thread. Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(self._text(), self._loop)
        try:
            return future.result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            future.cancel()
            raise


class _Handler(HttpHandler):
    def reply(self) -> None:
        server = self.server
        assert isinstance(server, MetricsServer)
        if self.path.partition("?")[0] != "/metrics":
            self.answer(HTTPStatus.NOT_FOUND, b"see /metrics\n")
            return
        try:
            if server.access is not None:
                server.access.check(_METHOD, HttpCaller(self))
            self.answer(HTTPStatus.OK, server.text(), CONTENT_TYPE_LATEST)
        except (Unauthenticated, PermissionDenied) as error:
            status = HTTPStatus.UNAUTHORIZED if isinstance(error, Unauthenticated) else HTTPStatus.FORBIDDEN
            self.answer(status, f"{error.message}\n".encode())
        except TimeoutError:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the coordinator is busy\n")
