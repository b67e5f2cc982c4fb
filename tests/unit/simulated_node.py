"""A node in one thread and in virtual time: the real coordinator and journal, simulated services, and a network that fails on request."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.command_log import LoggedLife, audit_commands, read_command_log
from tasuki.coordinator.history import read_history
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.operations import Operation
from tasuki.coordinator.replay import Audit, audit
from tasuki.v1 import trainer_pb2, types_pb2
from tasuki.wire.errors import DeadlineExceeded, OutOfGpuMemory, PeerUnavailable, TasukiError
from tasuki.wire.stages import Phase, Service, Stage
from tests.unit.simulated_faults import Crash, Fault, JournalFailpoints
from tests.unit.simulated_services import Disk, SimulatedRollout, SimulatedService, SimulatedTrainer

STAGE_TIMEOUT_S, STALL_S, RECOVERY_TIMEOUT_S, RESTART_S, LATE_S = 60.0, 90.0, 120.0, 1.0, 0.5


_LATENCY_S = 0.001


_NEVER_S = 7200.0
Answer = TypeVar("Answer")


_LOGGER = logging.getLogger("tasuki.rpc")


class _Stub:
    """Replaces a gRPC stub."""

    def __init__(self, node: "SimulatedNode", service: Service) -> None:
        self._node, self._service = node, service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return lambda request, timeout: self._node.call(self._service, method, request, timeout)


class SimulatedPeers(Peers):
    """The coordinator's peers, with stubs that call the simulation."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._trainer = self._rollout = None
        self._memory = {service: _Stub(node, service) for service in Service}
        self._trainer, self._rollout = self._memory[Service.TRAINER], self._memory[Service.ROLLOUT]
        self._epoch, self._timeout_s, self._drain_grace_s = node.epoch, STAGE_TIMEOUT_S, 10.0


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


class Simulation(ABC):
    """Owns the tasks of a simulation, and keeps the latest assertion that one of them broke. Its coordinator may crash."""

    broken: AssertionError | None = None
    _crashed: asyncio.Event

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_calls = self.num_crashes = 0

    @abstractmethod
    async def restart(self) -> None:
        """Kills the coordinator, as SIGKILL does, and starts another."""

    async def ask(self, operation: Callable[[], Operation]) -> TasukiError | None:
        """Repeats an operation as a client does, on the coordinator and its successors, until it ends. Returns its error."""
        async with asyncio.timeout(_NEVER_S):
            while True:
                following, crashed = self._task(_outcome(operation)), self._task(self._crashed.wait())
                await asyncio.wait({following, crashed}, return_when=asyncio.FIRST_COMPLETED)
                crashed.cancel()
                if not self._crashed.is_set():
                    return following.result()
                following.cancel()
                await self.restart()

    def _crash(self) -> None:
        self.num_crashes += 1
        self._crashed.set()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, action)

    def _task(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), AssertionError):
            self.broken = error

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SimulatedNode(Simulation):
    """Services that a supervisor restarts, and one coordinator at a time. fault: returns the fault of each call."""

    def __init__(self, folder: Path, *, fault: Callable[[], Fault | None], waits_for_room: bool) -> None:
        """waits_for_room: whether a starting service waits until the other one has left the GPU, as on CUDA."""
        super().__init__()
        self._path = folder / "journal.sqlite"
        self._fault, self._waits_for_room = fault, waits_for_room
        self.failpoints = JournalFailpoints(self._crash)
        self.disk = Disk()
        self.lives: dict[Service, list[SimulatedService]] = {service: [] for service in Service}
        self.logs = SimulatedLogs(self.lives)
        self.trainer: SimulatedTrainer | None = None
        self.rollout: SimulatedRollout | None = None
        self.num_kills = 0
        self._served = 0
        self._starting: set[Service] = set()
        self._begin_life(Service.ROLLOUT)
        self._begin_life(Service.TRAINER)
        self._start_coordinator()

    # Coordinator.

    def _start_coordinator(self) -> None:
        self._crashed = asyncio.Event()
        self._journal = Journal(self._path, failpoints=self.failpoints)
        self.epoch = self._journal.begin_epoch("coordinator")
        self.node = Node(
            self._journal,
            SimulatedPeers(self),
            boot_id="coordinator",
            trainer_target="",
            rollout_target="",
            restart=lambda service, cause: self._later(0.1, lambda: self.kill(service)),
            recovery_timeout_s=RECOVERY_TIMEOUT_S,
        )
        self._recovery = self._task(self.node.recover())

    async def _bury_coordinator(self) -> None:
        self._journal.close()
        self._recovery.cancel()
        await self.node.stop()

    async def restart_coordinator(self) -> None:
        await self._bury_coordinator()
        self._start_coordinator()

    async def restart(self) -> None:
        await self._bury_coordinator()
        await asyncio.sleep(0.5)
        self._start_coordinator()

    async def acquire(self, phase: Phase, request_id: str) -> TasukiError | None:
        return await self.ask(lambda: self.node.acquire(phase, request_id))

    async def run_stage(self, stage: Stage, request_id: str) -> TasukiError | None:
        return await self.ask(lambda: self.node.run_stage(stage, request_id))

    async def learn(self, request_id: str) -> TasukiError | None:
        """Makes one optimizer step on one sample."""
        command = types_pb2.CommandId(request_id=request_id)
        try:
            await self.call(Service.TRAINER, "OptimStep", trainer_pb2.OptimStepRequest(command=command), STAGE_TIMEOUT_S)
        except TasukiError as error:
            return error
        except Crash:
            return PeerUnavailable("the coordinator died")
        return None

    # Services.

    def life(self, service: Service) -> SimulatedService | None:
        return self.trainer if service is Service.TRAINER else self.rollout

    def _begin_life(self, service: Service) -> None:
        boot_id = f"{self.prefix}{service}-{len(self.lives[service]) + 1}"
        if service is Service.TRAINER:
            self.trainer = SimulatedTrainer(boot_id, self.disk)
            self.lives[service].append(self.trainer)
        else:
            self.rollout = SimulatedRollout(boot_id, lambda: self.trainer, self._see_served)
            self.lives[service].append(self.rollout)
        self._check_holders()

    def kill(self, service: Service) -> None:
        life = self.life(service)
        if life is not None:
            self.num_kills += 1
            life.died.set()
        if service is Service.TRAINER:
            self.trainer = None
        else:
            self.rollout = None
        if service not in self._starting:
            self._starting.add(service)
            self._task(self._start(service))

    async def _start(self, service: Service) -> None:
        """Starts a service as the supervisor does, including the time until it answers."""
        await asyncio.sleep(RESTART_S)
        while self._waits_for_room and not self._has_room(service):
            await asyncio.sleep(0.2)
        self._starting.discard(service)
        self._begin_life(service)

    def _has_room(self, service: Service) -> bool:
        if service is Service.ROLLOUT:
            return self.trainer is None or not self.trainer.is_resident
        return self.rollout is not None and not self.rollout.is_resident

    def _see_served(self, version: int) -> None:
        assert version >= self._served, f"version {version} is served after {self._served}"
        self._served = version

    def _check_holders(self) -> None:
        if self._waits_for_room and self.trainer is not None and self.rollout is not None:
            has_kv = self.rollout.stage in (Stage.RESUME_KV, Stage.DRAIN)
            assert not (has_kv and self.trainer.is_resident), "trainer and rollout both hold the GPUs"

    # Network.

    async def call(self, service: Service, method: str, request: Any, timeout: float) -> Any:
        self.num_calls += 1
        fault = self._fault()
        await asyncio.sleep(_LATENCY_S)
        self._prepare(service, fault)
        if fault is Fault.LATE:
            addressed = self.life(service)
            self._later(LATE_S, lambda: self._arrive(addressed, service, method, request))
        if fault is Fault.CRASH_LATE:
            abandoned = self.life(service)
            self._later(2 * LATE_S, lambda: self._arrive(abandoned, service, method, request))
            self._crash()
            raise Crash
        if fault in (Fault.DROP, Fault.LATE):
            raise PeerUnavailable("connection reset")
        life = self.life(service)
        if life is None:
            raise PeerUnavailable("nobody listens")
        if fault is Fault.DUPLICATE:
            self._task(getattr(life, method)(request))
        working = self._task(getattr(life, method)(request))
        if fault is Fault.CRASH:
            self._crash()
            raise Crash
        await self._wait(working, life, timeout)
        self._check_holders()
        if fault is Fault.KILL_AFTER:
            self.kill(service)
        if fault in (Fault.LOSE, Fault.KILL_AFTER):
            raise PeerUnavailable("connection reset")
        if isinstance(life, SimulatedRollout) and life.poison is not None:
            self._later(0.2, lambda: self.kill(Service.ROLLOUT) if life is self.rollout else None)
        return working.result()

    def _prepare(self, service: Service, fault: Fault | None) -> None:
        other = Service.ROLLOUT if service is Service.TRAINER else Service.TRAINER
        if fault in (Fault.KILL, Fault.KILL_OTHER):
            self.kill(service if fault is Fault.KILL else other)
        life = self.life(service)
        if life is not None:
            life.weather.seconds = STAGE_TIMEOUT_S / 2 if fault is Fault.SLOW else 0.1
            life.weather.hangs = fault is Fault.HANG
            life.weather.refusal = OutOfGpuMemory("no room") if fault is Fault.REFUSE else None
            life.weather.corrupts = fault is Fault.CORRUPT
        if fault is Fault.HANG:
            self._later(STALL_S, lambda: self._end_if_stuck(service, life))

    def _end_if_stuck(self, service: Service, life: SimulatedService | None) -> None:
        """Kills a service that makes no progress, as the supervisor does."""
        if life is not None and life is self.life(service) and life.weather.is_stuck:
            self.kill(service)

    async def _wait(self, working: asyncio.Task[Any], life: SimulatedService, timeout: float) -> None:
        died = self._task(life.died.wait())
        done, _ = await asyncio.wait({working, died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if working not in done:
            raise PeerUnavailable("the service ended") if done else DeadlineExceeded("it did not answer")

    def _arrive(self, life: SimulatedService | None, service: Service, method: str, request: Any) -> None:
        """A connection to one life of a service."""
        if life is None or life is not self.life(service):
            return
        is_over = hasattr(request, "command") and 0 < request.command.epoch < life.looked

        async def arrive() -> None:
            num_executed = life.executed.total()
            with suppress(TasukiError):
                await getattr(life, method)(request)
            self._check_holders()
            assert not is_over or life.executed.total() == num_executed, "a stage of an older coordinator was carried out"

        self._task(arrive())

    prefix = ""
    """Prefix of boot ids, for tests with several nodes."""

    # Shutdown and audit.

    async def close(self) -> Audit:
        """Stops everything and audits the journal. Raises AssertionError for any broken invariant."""
        await self._bury_coordinator()
        await self._end_tasks()
        if self.broken is not None:
            raise self.broken
        for lives in self.lives.values():
            for life in lives:
                twice = [request_id for request_id, count in life.executed.items() if count > 1]
                assert twice == [], f"{life.boot_id} carried {twice} out more than once"
        self.logs.close()
        logged = self.logs.read(self._path.parent)
        history = read_history(self._path)
        found = audit(history)
        assert found.violation is None, found.violation
        violation = audit_commands(history, logged)
        assert violation is None, violation
        return found


async def _outcome(operation: Callable[[], Operation]) -> TasukiError | None:
    try:
        async for _ in operation().follow():
            pass
    except TasukiError as error:
        return error
    return None
