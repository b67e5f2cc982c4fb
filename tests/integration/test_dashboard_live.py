"""The dashboard in a real Chromium, on a run or node that goes on."""

import asyncio
from pathlib import Path

import pytest

from tasuki.config.load import save_config
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.runs.folder import archived, name_run
from tasuki.v1 import types_pb2
from tests.browser import CHROMIUM, Browser
from tests.dashboard import served
from tests.integration.coordinator_process import coordinators, running_node
from tests.integration.dashboard_pages import browser, open_tab, page, shown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `apt-get install chromium` brings it")
__all__ = ["browser", "page"]


def test_a_node_whose_coordinator_does_not_answer_is_not_shown_as_ended(page: Browser, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    with shown(page, None, config=config) as url:
        with StateLock.take(config.state_dir, name=NODE_LOCK):
            open_tab(page, url, "node", "The coordinator is starting.")
            page.until("document.querySelector('#live').innerText === 'no answer'")
            assert "not running" not in page.text("#view-node")
        page.until("document.querySelector('#live').innerText === 'no node runs'")
        page.until("document.querySelector('#view-node').innerText.includes('not running')")


async def test_a_node_that_runs_is_followed_through_a_changeover(page: Browser, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    async with running_node(config) as node:
        with served(None, config=config) as server:
            await asyncio.to_thread(open_tab, page, server.url, "node", "Coordinator")
            page.until("document.querySelector('#live').innerText === 'live · training'")
            assert page.evaluate("document.querySelector('.phase.train').getAttribute('aria-current')") == "step"
            assert "training to generating: last \u2013" in page.text(".arrows"), "there was no changeover yet"
            await node.acquire(types_pb2.PHASE_ROLLOUT)
            await asyncio.to_thread(
                page.until, "document.querySelector('.phase.rollout').getAttribute('aria-current') === 'step'"
            )
            await asyncio.to_thread(page.until, "document.querySelector('#live').innerText === 'live · generating'")
            await node.acquire(types_pb2.PHASE_TRAIN)
            await asyncio.to_thread(page.until, "document.querySelector('.is-at .name').innerText.includes('trainer returns')")
            await asyncio.to_thread(open_tab, page, server.url, "changeovers", "c000002")
            await asyncio.to_thread(page.open, "about:blank#left")
        name_run(config.state_dir, run := tmp_path / "run")
        with archived(config.state_dir, run):
            pass
        with served(run) as server:
            await asyncio.to_thread(open_tab, page, server.url, "node", "Coordinator")
            await asyncio.to_thread(page.until, "document.querySelector('#live').innerText === 'live · training'")
            await asyncio.to_thread(page.open, "about:blank#left")


async def test_a_node_without_its_services_has_no_version_and_no_changeover(page: Browser, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    async with coordinators(config) as start:
        await start()
        with served(None, config=config) as server:
            await asyncio.to_thread(open_tab, page, server.url, "node", "Coordinator")
            await asyncio.to_thread(
                page.until, "document.querySelector('#live').innerText === 'live · waiting for trainer and rollout'"
            )
            shown = page.text("#view-node .facts")
            assert "waiting for trainer and rollout" in shown and shown.count("unknown") == 2, shown
            await asyncio.to_thread(page.open, "about:blank#left")
