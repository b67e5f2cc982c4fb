"""The dashboard in a real Chromium, on a recorded run."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from tasuki.coordinator.journal import Journal
from tasuki.memory.stages import HOLDS, Phase
from tasuki.supervisor.rotation import KEPT_LOGS, rotate
from tests.browser import CHROMIUM, Browser
from tests.dashboard import RECORDED, served
from tests.integration.dashboard_pages import browser, open_tab, page, recorded

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `apt-get install chromium` brings it")
__all__ = ["browser", "page", "recorded"]
TABS = ["node", "memory", "run", "samples", "changeovers"]
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_every_view_of_a_recorded_run_has_its_figures(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "run", "Held-out score")
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
    open_tab(page, recorded.url, "node", "RESUME_KV")
    page.evaluate("document.querySelector('#tab-node').focus()")
    for tab in [*TABS[1:], TABS[0]]:
        page.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.evaluate(
            "[...document.querySelectorAll('[role=tabpanel]')].filter((one) => !one.hidden).map((one) => one.id)"
        ) == [f"view-{tab}"]
    page.press("End", "ArrowLeft", "ArrowLeft")
    page.until("document.querySelector('#view-run svg')")
    page.evaluate("document.querySelector('#view-run svg').focus()")
    page.press("Home")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "step 0: mean reward 0.3613"
    page.press("ArrowRight", "ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 2: mean reward")


def test_the_focus_is_not_hidden_behind_the_tabs(page: Browser, recorded) -> None:
    page.resize(1360, 500)
    try:
        open_tab(page, recorded.url, "changeovers", "c000064")
        page.evaluate("[...document.querySelectorAll('#view-changeovers .open')].at(20).focus()")
        for _ in range(20):
            page.press("Shift+Tab")
            below = "document.activeElement.getBoundingClientRect().top - document.querySelector('#tabs').getBoundingClientRect().bottom"
            assert page.evaluate(below) >= 0, page.evaluate("document.activeElement.innerText")
    finally:
        page.resize(1360, 1000)


def test_a_screen_reader_finds_the_tabs_and_each_heading_below_its_own(page: Browser, recorded) -> None:
    assert page.evaluate("document.querySelector('#tabs').closest('nav').ariaLabel") == "Views"
    for tab, shows in zip(TABS, ("RESUME_KV", "Memory of cpu", "Entropy", "Group 44", "c000064"), strict=True):
        open_tab(page, recorded.url, tab, shows)
        levels = page.evaluate(
            "[...document.querySelectorAll('h1, h2, h3')].filter((one) => one.offsetParent).map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), (tab, levels)


def test_what_a_control_cannot_load_is_told(page: Browser, recorded) -> None:
    uses = {
        "memory": "document.querySelector('#memory-window').dispatchEvent(new Event('change'))",
        "run": "document.querySelector('#view-run details').open = true",
        "samples": "document.querySelector('.groups button:not([aria-current=true])').click()",
    }
    for (tab, use), shows in zip(uses.items(), ("Memory of cpu", "Entropy", "Group 44"), strict=True):
        open_tab(page, recorded.url, tab, shows)
        page.evaluate("window.fetch = async () => { throw new Error('no network'); }")
        page.evaluate(use)
        page.until("document.querySelector('#problem').innerText === 'no network'", timeout_s=5)
    assert page.complaints == []


def test_samples_are_for_the_keyboard(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "samples", "Group 44")
    page.until("document.querySelector('.groups button[aria-current=true]')")
    page.evaluate("document.querySelector('.groups button[aria-current=true]').focus()")
    page.press("ArrowDown", "ArrowDown")
    page.until("document.querySelector('.sample h2').innerText.endsWith('completion 2')")
    page.evaluate("document.querySelector('.tokens').focus()")
    page.press("End")
    assert "token 5 of 5" in page.text(".sample [aria-live]") and '"<eos>", id 2' in page.text(".sample [aria-live]")
    page.press("ArrowLeft")
    assert "token 4 of 5" in page.text(".sample [aria-live]")
    page.press("[")
    page.until("document.querySelector('#view-samples input').value === '16'")
    page.press("]")
    page.until("document.querySelector('#view-samples input').value === '29'")


def test_another_step_is_chosen_while_the_focus_is_on_the_tab(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "node", "RESUME_KV")
    page.press("Tab", "Tab", "Home", "ArrowRight", "ArrowRight", "ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-samples"
    page.until("document.querySelector('#view-samples input').value === '29'")
    page.press("[")
    page.until("document.querySelector('#view-samples input').value === '16'")
    page.press("End")
    page.until("document.querySelector('#view-changeovers').innerText.includes('c000064')")
    page.press("[", "Home", "ArrowLeft", "ArrowLeft")
    page.until("document.querySelector('#view-samples').innerText.includes('Group')")
    assert page.evaluate("document.querySelector('#view-samples input').value") == "16", (
        "keys of another view leave it as it is"
    )


def test_starts_of_a_node_are_no_restarts_and_the_counts_say_what_they_cover(page: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    rotate(folder / "logs" / "supervisor.log", keep=KEPT_LOGS)
    (folder / "logs" / "supervisor.log").touch()
    with closing(Journal(folder / "journal.sqlite")) as journal:
        journal.begin_epoch("boot-2")
        done = journal.begin_changeover("again", origin=HOLDS[Phase.TRAIN], target=Phase.ROLLOUT)
        journal.end_changeover(done, seconds=0.5)
    with served(folder) as server:
        open_tab(page, server.url, "changeovers", "c000065")
        page.until("document.querySelector('#view-changeovers').innerText.includes('1 since the last start')")
        told = " ".join(page.text("#view-changeovers").split())
        for words in (
            "Done 63 1 since the last start",
            "Failed 2 0 since the last start",
            "Restarts 1 rollout 1; 0 since the last start",
            "since the node's first start, 2026-",
            "those of its last 2 starts",
            "killed by signal 9",
        ):
            assert words in told
        open_tab(page, server.url, "node", "RESUME_KV")
        assert "Restarts 1 rollout 1; 0 since the last start" in " ".join(page.text("#view-node").split())
        page.open("about:blank#left")


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


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_needs_no_sideways_scrolling(page: Browser, recorded, width: int) -> None:
    page.resize(width, 800)
    try:
        for tab, shows in zip(TABS, ("RESUME_KV", "Memory of cpu", "Entropy", "Group 44", "c000064"), strict=True):
            open_tab(page, recorded.url, tab, shows)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
    finally:
        page.resize(1360, 1000)


def test_the_chosen_tab_of_a_narrow_window_is_in_view(page: Browser, recorded) -> None:
    in_view = """(() => { const [tab, tabs] = [...document.querySelectorAll('[aria-selected=true], #tabs')].reverse()
      .map((one) => one.getBoundingClientRect());
      return tab.left >= tabs.left && tab.right <= tabs.right + 0.5 && tab.right <= innerWidth + 0.5; })()"""
    page.resize(400, 800)
    try:
        for tab in ("changeovers", "node"):
            open_tab(page, recorded.url, tab, "Restarts")
            assert page.evaluate(in_view), tab
        page.evaluate("document.querySelector('#tab-node').focus()")
        page.press("End")
        assert page.evaluate(in_view)
    finally:
        page.resize(1360, 1000)


def test_in_forced_colours_only_the_chosen_tab_is_underlined(page: Browser, recorded) -> None:
    page.prefer(forced_colors="active")
    try:
        open_tab(page, recorded.url, "memory", "Memory of cpu")
        underlined = page.evaluate("""[...document.querySelectorAll('[role=tab]')].filter((one) => {
          const style = getComputedStyle(one);
          return style.borderBottomStyle !== 'none' && !/^rgba.*, 0\\)$/.test(style.borderBottomColor);
        }).map((one) => one.innerText)""")
        assert underlined == ["Memory"]
        heights = page.evaluate("new Set([...document.querySelectorAll('[role=tab]')].map((one) => one.offsetHeight)).size")
        assert heights == 1
    finally:
        page.prefer(forced_colors="none")


def test_dark_and_light_have_enough_contrast_for_texts_and_fields(page: Browser, recorded) -> None:
    for scheme in ("light", "dark"):
        page.prefer(prefers_color_scheme=scheme)
        open_tab(page, recorded.url, "run", "Entropy")
        for selector in (".fact dt", ".fact dd", ".legend li", ".note"):
            assert page.evaluate(f"({CONTRAST})(document.querySelector('{selector}'))") >= 4.5, (scheme, selector)
        border = page.evaluate(f"({CONTRAST})(document.querySelector('.tools input'), 'borderTopColor')")
        assert border >= 3, scheme
    page.prefer(prefers_color_scheme="light")


CONTRAST = """(element, property = "color") => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  let behind = element;
  while (behind && (parts(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [one, other] = [parts(getComputedStyle(element)[property]), parts(getComputedStyle(behind).backgroundColor)].map(light);
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""


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
        open_tab(page, server.url, "node", "onerror")
        assert page.evaluate("document.title") == "run · tasuki"
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        page.open("about:blank#left")


def test_a_control_that_a_new_view_lacks_leaves_the_focus_on_the_view(page: Browser, recorded) -> None:
    open_tab(page, recorded.url, "changeovers", "c000064")
    page.evaluate("document.querySelector('#view-changeovers .open[data-key=c000063]').focus()")
    page.evaluate("document.querySelector('#view-changeovers input[type=checkbox]').click()")
    page.until("document.querySelectorAll('#view-changeovers .open').length === 2")
    assert page.evaluate("document.activeElement.id") == "view-changeovers"
