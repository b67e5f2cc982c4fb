"""`tasuki state` while services are away: it reports those that run, and a node is down only if nobody holds its lock."""

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tasuki.cli.node_view import show_state, watch
from tasuki.config.load import save_config
from tasuki.config.lock import NODE_LOCK, Instance, StateLock, begin_instance, read_instance
from tasuki.config.paths import log_path, socket_dir
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.exit_report import write_exit_report
from tasuki.node.node_snapshot import NodeReader
from tasuki.node.start import wait_until_serving
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.errors import NodeDown
from tests.integration.coordinator_process import DEADLINE_S, coordinated
from tests.integration.stage_services import serving


async def test_services_that_are_away_are_marked_and_the_others_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    async with AsyncExitStack() as until_the_end:
        until_the_end.enter_context(StateLock.take(config.state_dir, name=NODE_LOCK))
        begin_instance(config.state_dir)
        async with serving(config) as services:
            node = await until_the_end.enter_async_context(coordinated(config, *services))
            await node.settled()
            with NodeReader(config) as reader:
                assert dict((await asyncio.to_thread(reader.read)).absent) == {}
            assert await asyncio.to_thread(show_state, config, as_json=False, must_serve=True) == 0
            told = list[str]()
            await asyncio.to_thread(wait_until_serving, config, tell=told.append, supervisor=None)
            assert sorted(told[:3]) == [f"{name} serves already" for name in ("coordinator", "rollout", "trainer")]
        with NodeReader(config) as reader:
            snapshot = await asyncio.to_thread(reader.read)
        assert dict(snapshot.absent) == dict.fromkeys(("trainer", "rollout"), "is starting")
        assert snapshot.node.phase == PHASE_TRAIN
        assert snapshot.node.instance_id
        assert Instance(snapshot.node.instance_id, snapshot.node.lock_path) == read_instance(config.state_dir)
        capsys.readouterr()
        log = log_path(config.state_dir, "supervisor")
        log.write_text("".join(f"event=restart service={name} number=1\n" for name in ("trainer", "coordinator")))
        assert await asyncio.to_thread(show_state, config, as_json=False) == 0
        text = capsys.readouterr().out
        lines = [line.split(maxsplit=1)[1].strip() for line in text.splitlines() if line.startswith(("trainer ", "rollout "))]
        assert [line for line in lines if not line.startswith("at ")] == ["is being restarted", "is starting"]
        assert await asyncio.to_thread(show_state, config, as_json=False, must_serve=True) == 1
        with log.open("a") as lines:
            lines.write("event=restart_waits service=trainer error=INVALID_ARGUMENT: security.cert: away\n")
        capsys.readouterr()
        await asyncio.to_thread(show_state, config, as_json=True)
        assert (
            json.loads(capsys.readouterr().out)["absent"]["trainer"]
            == "waits to be restarted: INVALID_ARGUMENT: security.cert: away"
        )
        watching = asyncio.create_task(asyncio.to_thread(watch, config))
        await asyncio.sleep(1.0)
        node.process.kill()
        await asyncio.wait_for(node.process.wait(), DEADLINE_S)
        await asyncio.to_thread(show_state, config, as_json=True)
        text = capsys.readouterr().out
        assert json.loads(text[text.index("{") :])["absent"]["coordinator"] == "is being restarted"
        assert not watching.done()
        write_exit_report(config.state_dir, reason="the supervisor was killed by SIGKILL", first=None)
    assert await asyncio.wait_for(watching, DEADLINE_S) == 1
    assert "NODE_DOWN" in (error := capsys.readouterr().err)
    assert "the supervisor was killed by SIGKILL" in error
    with pytest.raises(NodeDown, match="because the supervisor was killed by SIGKILL"):
        await asyncio.to_thread(show_state, config, as_json=False)
    shutil.rmtree(socket_dir(config.state_dir))
