"""Real gRPC between the coordinator and two services over breaking connections: no stage is carried out twice.

`make test` breaks them 150 times, `make chaos` a thousand times.
"""

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from tasuki.config.paths import node_targets
from tasuki.config.schema import CoordinatorConfig, ModelConfig, NodeConfig
from tasuki.coordinator.changeover import Peers
from tasuki.coordinator.history import read_history
from tasuki.coordinator.journal import Intent, Journal, Outcome
from tasuki.coordinator.node import Node
from tasuki.coordinator.phases import Observed
from tasuki.coordinator.replay import audit
from tasuki.wire.errors import PeerUnavailable, TasukiError
from tasuki.wire.stages import RULES, Phase, Service
from tests.extent import IS_WHOLE
from tests.integration.stage_services import StageRollout, StageTrainer, serving
from tests.unit.memory_folder import memory_folder

NUM_FAULTS, SHARE, SEED = 1000 if IS_WHOLE else 150, 0.2, 5
DUPLICATE = "the request arrives twice"


HOLD_S = 0.02


class Break(StrEnum):
    """Fault for the next bytes that a client sends."""

    LOST_BEFORE = "they are thrown away, and the connection is reset"
    LOST_AFTER = "they arrive; what is answered is thrown away, and then the connection is reset"
    DELAY = "they arrive later"
    RESET = "they arrive, and the connection is reset at once"


class FaultyProxy:
    """Forwards bytes between clients of one socket and the server of another. armed: the next fault, which happens once."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.armed: Break | None = None

    async def start(self, path: Path) -> None:
        self._listener = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream_reader, upstream = await asyncio.open_unix_connection(self._server)
        is_mute = asyncio.Event()
        answers = asyncio.create_task(_pump(upstream_reader, writer, is_mute))
        try:
            while content := await reader.read(65536):
                broken, self.armed = self.armed, None
                if broken is Break.LOST_BEFORE:
                    return
                if broken is Break.LOST_AFTER:
                    is_mute.set()
                if broken is Break.DELAY:
                    await asyncio.sleep(HOLD_S)
                upstream.write(content)
                await upstream.drain()
                if broken is Break.LOST_AFTER:
                    await asyncio.sleep(HOLD_S)
                if broken in (Break.LOST_AFTER, Break.RESET):
                    return
        except ConnectionError:
            pass  # one of the two ends is closed
        finally:
            answers.cancel()
            for end in (writer, upstream):
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_mute: asyncio.Event) -> None:
    with suppress(ConnectionError):
        while content := await reader.read(65536):
            if not is_mute.is_set():
                writer.write(content)
                await writer.drain()


class FaultyPeers(Peers):
    """The coordinator's peers; each call first draws a fault for its connection."""

    def __init__(self, proxies: dict[Service, FaultyProxy], folder: Path) -> None:
        targets = {service: f"unix:{folder}/{service}.proxy" for service in Service}
        super().__init__(targets, CoordinatorConfig(stage_timeout_s=20.0, drain_grace_s=1.0), epoch=1)
        self._proxies, self._draw = proxies, random.Random(SEED)
        self.is_calm = False
        self.faults: Counter[str] = Counter()

    async def observe(self) -> Observed:
        self._arm(self._draw.choice(list(Service)), list(Break))
        return await super().observe()

    async def carry_out(self, intent: Intent, *, published: bytes) -> Outcome:
        fault = self._arm(RULES[intent.stage].service, list(Break) if intent.is_undo else [*Break, DUPLICATE])
        sent = super().carry_out
        if fault == DUPLICATE:
            first, second = await asyncio.gather(*(sent(intent, published=published) for _ in range(2)))
            assert first == second
            return first
        return await sent(intent, published=published)

    def _arm(self, service: Service, faults: list[Any]) -> str:
        """Arms a drawn fault for the next bytes; a fault that has not happened yet is not counted again."""
        if self.is_calm or self._draw.random() > SHARE or self._proxies[service].armed is not None:
            return ""
        fault = self._draw.choice(faults)
        self.faults[fault] += 1
        if fault != DUPLICATE:
            self._proxies[service].armed = fault
        return fault


@asynccontextmanager
async def services(config: NodeConfig) -> AsyncIterator[tuple[StageTrainer, StageRollout, dict[Service, FaultyProxy]]]:
    async with serving(config) as (trainer, rollout), AsyncExitStack() as stack:
        trainer.weather.seconds = rollout.weather.seconds = 0.001
        proxies = {}
        for service in Service:
            proxies[service] = FaultyProxy(Path(node_targets(config)[service].removeprefix("unix:")))
            await proxies[service].start(config.state_dir / f"{service}.proxy")
            stack.push_async_callback(proxies[service].close)
        yield trainer, rollout, proxies


async def acquire(node: Node, phase: Phase, request_id: str) -> TasukiError | None:
    async with asyncio.timeout(60.0):
        try:
            async for _ in node.acquire(phase, request_id).follow():
                pass
        except TasukiError as error:
            return error
    return None


async def test_faults_carry_no_stage_out_twice_and_every_changeover_ends() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tasuki-", dir=memory_folder()))
    journal = Journal(folder / "journal.sqlite")
    journal.begin_epoch("boot-1")
    restarts: list[Service] = []
    async with services(NodeConfig(state_dir=folder, model=ModelConfig(path=folder))) as (trainer, rollout, proxies):
        peers = FaultyPeers(proxies, folder)
        node = Node(
            journal,
            peers,
            boot_id="boot-1",
            trainer_target="",
            rollout_target="",
            restart=lambda service, cause: restarts.append(service),
            recovery_timeout_s=20.0,
        )
        number = 0
        while sum(peers.faults.values()) < NUM_FAULTS:
            error = await acquire(node, (Phase.ROLLOUT, Phase.TRAIN)[number % 2], f"{number}")
            assert error is None or isinstance(error, PeerUnavailable), repr(error)
            number += 1
        peers.is_calm = True
        for proxy in proxies.values():
            proxy.armed = None
        for phase in (Phase.TRAIN, Phase.ROLLOUT, Phase.TRAIN):
            assert await acquire(node, phase, f"{phase} after {number}") is None
            number += 1
        assert Phase.of(node.state().phase) is Phase.TRAIN
        await peers.close()
    journal.close()
    found = audit(read_history(folder / "journal.sqlite"))
    shutil.rmtree(folder)
    assert found.violation is None, found.violation
    assert [count for life in (trainer, rollout) for count in life.executed.values() if count != 1] == []
    assert len(trainer.executed) + len(rollout.executed) > NUM_FAULTS
    assert min(peers.faults[fault] for fault in (*Break, DUPLICATE)) > NUM_FAULTS // 20
    assert restarts == []
