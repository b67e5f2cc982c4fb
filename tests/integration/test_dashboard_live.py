"""The dashboard in a real Chromium, on a run or node that goes on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.save import save_config
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.v1 import types_pb2
from tests.browser import CHROMIUM, Browser
from tests.dashboard import RECORDED, served
from tests.integration.coordinator_process import running_node
from tests.integration.dashboard_pages import browser, open_tab, page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `apt-get install chromium` brings it")
__all__ = ["browser", "page"]


def test_figures_come_as_the_run_makes_them(page: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    with served(folder) as server:
        open_tab(page, server.url, "run", "0.965")
        with (folder / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 31, "mean_reward": 0.1234}\n')
        page.until("document.querySelector('#view-run').innerText.includes('0.123')")
        open_tab(page, server.url, "samples", "Group 44")
        page.until("document.querySelector('.tokens')")
        page.evaluate("document.querySelector('[aria-label=\"Step before\"]').click()")
        page.until("document.querySelector('.sample').innerText.includes('version\\n16')")
        page.evaluate("document.querySelector('.tokens').focus()")
        page.press("End")
        shutil.copy(folder / "samples" / "step-000029.jsonl", folder / "samples" / "step-000030.jsonl")
        page.until("document.querySelector('#view-samples').innerText.includes('7 steps, 0 to 30')")
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert page.evaluate("document.activeElement.className") == "tokens", "who reads a completion is not disturbed"
        assert "token 5 of 5" in page.text(".sample [aria-live]")
    page.until("document.querySelector('#live').innerText === 'not connected'")
    page.open("about:blank#left")
    page.complaints.clear()  # of a server that no longer runs


def test_a_node_whose_coordinator_does_not_answer_is_not_shown_as_ended(page: Browser, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    with served(None, config=config) as server:
        with StateLock.take(config.state_dir, name=NODE_LOCK):
            open_tab(page, server.url, "node", "The coordinator is starting.")
            page.until("document.querySelector('#live').innerText === 'no answer'")
            assert "not running" not in page.text("#view-node")
        page.until("document.querySelector('#live').innerText === 'no node runs'")
        page.until("document.querySelector('#view-node').innerText.includes('not running')")
        page.open("about:blank#left")


async def test_a_node_that_runs_is_followed_through_a_changeover(page: Browser, tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))
    async with running_node(config) as node:
        with served(None, config=config) as server:
            await asyncio.to_thread(open_tab, page, server.url, "node", "Coordinator")
            page.until("document.querySelector('#live').innerText === 'live · TRAIN'")
            assert page.evaluate("document.querySelector('.phase.train').getAttribute('aria-current')") == "step"
            assert "TRAIN to ROLLOUT: last \u2013" in page.text(".arrows"), "there was no changeover yet"
            await node.acquire(types_pb2.PHASE_ROLLOUT)
            await asyncio.to_thread(
                page.until, "document.querySelector('.phase.rollout').getAttribute('aria-current') === 'step'"
            )
            await asyncio.to_thread(page.until, "document.querySelector('#live').innerText === 'live · ROLLOUT'")
            await node.acquire(types_pb2.PHASE_TRAIN)
            await asyncio.to_thread(page.until, "document.querySelector('.events')?.innerText.includes('LOAD_TRAINER')")
            await asyncio.to_thread(open_tab, page, server.url, "changeovers", "c000002")
            await asyncio.to_thread(page.open, "about:blank#left")
