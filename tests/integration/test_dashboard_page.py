"""The dashboard in a real Chromium, on a recorded run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Browser
from tests.dashboard import RECORDED, served
from tests.integration.dashboard_pages import browser, open_tab, page, recorded

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `apt-get install chromium` brings it")
__all__ = ["browser", "page", "recorded"]
TABS = ["run", "samples", "evaluations", "settings", "log", "node", "memory", "changeovers"]
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_every_view_of_a_recorded_run_has_its_figures(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "run", "Held-out reward")
    assert "0.988" in page.text("#view-run") and "from 0.277" in page.text("#view-run")
    assert page.evaluate("document.querySelectorAll('#view-run svg .curve').length") > 8
    assert page.evaluate("document.querySelectorAll('#view-run svg .area').length") == 16  # parts of a step, and stages
    open_tab(page, recorded.url, "memory", "Memory of cpu")
    assert "prediction of tasuki plan, " in page.text("#view-memory")
    assert "rollout kv_cache" in page.text("#view-memory") and "plan for these tags" in page.text("#view-memory")
    open_tab(page, recorded.url, "node", "RESUME_KV")
    assert page.evaluate("document.querySelectorAll('.ring .stage').length") == 9
    open_tab(page, recorded.url, "changeovers", "c000064")
    assert "killed by signal 9" in page.text("#view-changeovers")
    open_tab(page, recorded.url, "samples", "Group 44")
    page.until("document.querySelectorAll('.tokens span').length === 5")


def test_the_token_does_not_stay_in_the_address(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "run", "Reward")
    assert page.evaluate("location.href").endswith("/#run")


def test_a_page_that_is_opened_again_and_again_is_served(page: Browser, recorded) -> None:
    for _ in range(24):
        open_tab(page, recorded.url, "run", "Reward")


def test_without_the_token_the_page_asks_for_it(browser: Browser, recorded) -> None:
    url, _, token = recorded.url.partition("#token=")
    browser.open(f"{url}#run")
    browser.evaluate("sessionStorage.clear()")
    browser.open(f"{url}#run")
    browser.until("!document.querySelector('#ask').hidden")
    assert "0.988" not in browser.text("body")
    browser.evaluate(f"document.querySelector('#token').value = '{token}'; document.querySelector('#token-use').click()")
    browser.until("document.querySelector('#view-run')?.innerText.includes('0.988')")


def test_tabs_and_charts_are_for_the_keyboard(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "run", "Reward")
    page.evaluate("document.querySelector('#tab-run').focus()")
    for tab in [*TABS[1:], TABS[0]]:
        page.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.evaluate(
            "[...document.querySelectorAll('[role=tabpanel]')].filter((one) => !one.hidden).map((one) => one.id)"
        ) == [f"view-{tab}"]
    page.press("End", "ArrowRight")
    page.until("document.querySelector('#view-run svg')")
    page.evaluate("document.querySelector('#view-run svg').focus()")
    page.press("Home")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "step 0: mean reward 0.3613"
    page.press("ArrowRight", "ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 2: mean reward")


def test_a_changeover_opens_to_its_stages_and_their_failures(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "changeovers", "c000064")
    page.evaluate("document.querySelector('#view-changeovers input[type=checkbox]').click()")
    page.until("document.querySelectorAll('#view-changeovers .open').length === 2")
    page.evaluate("[...document.querySelectorAll('.open')].at(-1).focus()")
    page.press("Enter")
    page.until("document.querySelector('.detail')?.innerText.includes('SYNC')")
    assert "PEER_UNAVAILABLE" in page.text(".detail")
    assert page.text(".detail code") == "tasuki state" and "`" not in page.text(".detail")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"


def test_what_a_run_says_is_text_and_never_markup(page: Browser, tmp_path: Path) -> None:
    folder = tmp_path / MARKUP.partition("<script>")[0] / "run"
    shutil.copytree(RECORDED, folder)
    (folder / "memory.jsonl").unlink()
    os.mkfifo(folder / "memory.jsonl")
    sample = {"group": MARKUP, "sample": 0, "prompt": MARKUP, "completion": MARKUP, "rewards": {MARKUP: 1}, "fields": {MARKUP: MARKUP},
              "token_ids": [0, 1], "rollout_log_probs": [-1, -2], "trainer_log_probs": [-1.5, -2]}  # fmt: skip
    (folder / "samples" / "step-000029.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {MARKUP: 0, "x": 1}}}))
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 31, "mean_reward": 1.0, "metrics": {MARKUP: 2.0, f"reward/{MARKUP}": 1.0}}) + "\n")
        for number, sign in ((32, 1), (33, -1)):
            extremes = {"small": sign * 5e-324, "large": sign * 1.7e308, "grad_norm": 1e308}
            lines.write(json.dumps({"step": number, "metrics": extremes}) + "\n")
    (folder / "summary.json").write_text(json.dumps({MARKUP: MARKUP}))
    with served(folder) as server:
        open_tab(page, server.url, "samples", "onerror")
        page.until("document.querySelector('.tokens')?.innerText.includes('onerror')")
        open_tab(page, server.url, "run", "onerror")
        assert page.text("#unreadable") == f"{folder / 'memory.jsonl'} cannot be read: is not a regular file"
        page.evaluate("document.querySelector('#view-run details summary').click()")
        page.until(
            "[...document.querySelectorAll('#view-run figure')].filter((one) => one.innerText.match(/^(small|large)/)).length === 2"
        )
        assert page.evaluate("document.querySelector('#problem').hidden")
        open_tab(page, server.url, "settings", "onerror")
        assert page.evaluate("document.title") == "run · tasuki"
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        page.open("about:blank#left")
