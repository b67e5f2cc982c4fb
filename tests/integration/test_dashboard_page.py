"""The dashboard in a real Chromium, on a recorded run."""

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import CHROMIUM, Browser
from tests.dashboard import RECORDED
from tests.integration.dashboard_pages import browser, open_tab, page, recorded, shown

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
    open_tab(page, recorded.url, "node", "map KV cache")
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
    with shown(page, folder) as url:
        open_tab(page, url, "samples", "onerror")
        page.until("document.querySelector('.tokens')?.innerText.includes('onerror')")
        open_tab(page, url, "run", "onerror")
        assert page.text("#unreadable") == f"{folder / 'memory.jsonl'} cannot be read: is not a regular file"
        page.evaluate("document.querySelector('#view-run details summary').click()")
        page.until(
            "[...document.querySelectorAll('#view-run figure')].filter((one) => one.innerText.match(/^(small|large)/)).length === 2"
        )
        assert page.evaluate("document.querySelector('#problem').hidden")
        open_tab(page, url, "settings", "onerror")
        assert page.evaluate("document.title") == "run · tasuki"
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0


def test_images_of_a_prompt_are_shown_beside_its_completion(page: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    Image.new("RGB", (20, 30), (200, 40, 40)).save(folder / "red.png")
    content = [{"type": "image", "path": str(folder / "red.png")}, {"type": "text", "text": "Which color?"}]
    sample = {"group": 0, "sample": 0, "prompt": [{"role": "user", "content": content}], "completion": "red", "token_ids": [0]}
    (folder / "samples" / "step-000029.jsonl").write_text(json.dumps(sample) + "\n")
    with shown(page, folder) as url:
        open_tab(page, url, "samples", "Which color?")
        page.until("document.querySelector('.pictures img')?.naturalHeight === 30")


def test_a_run_that_learns_nothing_says_so_and_what_it_does_now(page: Browser, stalled: Path) -> None:
    with shown(page, stalled, others=[RECORDED]) as url:
        page.open(url)
        page.until("document.querySelector('#view-run .warned')?.innerText.includes('The newest 4 steps changed no weights')")
        assert page.evaluate("location.href").endswith("/#run"), "a run's page opens on the run"
        assert "answering held-out prompts: 3 of 8 · 120 tokens/s · step 4 of 9" in page.text("#progress")
        assert "steps without update: 4" in page.text("#view-run figure") and "· recorded_run" in page.text("#view-run figure")
        signal = "[...document.querySelectorAll('#view-run figure')].find((one) => one.innerText.startsWith('Signal'))"
        assert "-0." not in page.evaluate(f"{signal}.textContent"), "a share of 0 has no negative axis"
        page.evaluate("document.querySelector('#view-run figure .help').focus()")
        page.press("Enter")
        page.until("document.querySelector('#explained').matches(':popover-open')")


def test_a_supervised_run_has_its_own_views_and_latest_settings(page: Browser, stalled: Path) -> None:
    run = stalled / "run.toml"
    text = 'state_dir = "/s"\ndevice = "cpu"\n[model]\npath = "/m"\n[sft]\ndataset = "/d"\noutput_dir = "/o"\nnum_steps = '
    run.write_text(f"{text}40")
    with shown(page, stalled) as url:
        open_tab(page, url, "settings", "sft.num_steps")
        run.write_text(f"{text}600")
        open_tab(page, url, "run", "of 9 ended")
        page.until("document.querySelector('#tab-samples').hidden && document.querySelector('#tab-evaluations').hidden")
        page.evaluate("document.querySelector('#tab-run').focus()")
        page.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-settings"
        page.until("document.querySelector('#view-settings').innerText.includes('600')")


BROKEN_HEADINGS = """[...document.querySelectorAll('main thead th')].filter((one) => {
    const text = document.createRange();
    text.selectNodeContents(one);
    return text.getClientRects().length > one.innerText.split(" ").length;
}).map((one) => one.innerText)"""
"""Headings of tables with more lines than words."""


def test_a_phone_shows_all_without_scrolling_sideways(page: Browser, recorded) -> None:
    page.resize(390, 800)
    try:
        for tab, shows in (("run", "Held-out reward"), ("settings", "trainer.learning_rate"), ("changeovers", "c000064")):
            open_tab(page, recorded.url, tab, shows)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
            assert page.evaluate(
                "[...document.querySelectorAll('main .scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
            ), tab
            assert page.evaluate(BROKEN_HEADINGS) == [], tab
    finally:
        page.resize(1360, 1000)


def test_chats_filters_and_held_out_rows(page: Browser, stalled: Path) -> None:
    with shown(page, stalled) as url:
        open_tab(page, url, "samples", "Reward short, unweighted")
        page.until("document.querySelector('.chat')?.innerText.includes(\"<b>two</b>\")")
        assert page.evaluate("[...document.querySelectorAll('.turn h3')].map((one) => one.innerText).join()") == (
            "system,user,assistant, this completion"
        )
        page.evaluate("document.querySelector('#view-samples .sample summary').click()")
        assert "<Ġ>two" in page.text("#view-samples .sample details")
        enter(page, "#view-samples input[type=search]", "FOUR")
        page.until("document.querySelectorAll('.group button').length === 1")
        enter(page, "#view-samples input[type=search]", "")
        enter(page, "#view-samples input[aria-label='Largest reward']", "0.5")
        page.until("document.querySelectorAll('.group button').length === 2")
        open_tab(page, url, "evaluations", "Row 1")
        assert " ".join(page.text("#view-evaluations .facts").split()) == "Better 1 Worse 0 Unchanged 1 Held-out rows 2"
        assert page.evaluate("document.querySelectorAll('.row').length") == 1
        page.evaluate("document.querySelector('.row summary').click()")
        assert "wrong" in page.text(".row .columns") and "right" in page.text(".row .columns")
        open_tab(page, url, "settings", "trainer.learning_rate")
        assert "tasuki train node.toml" in page.text("#view-settings")
        open_tab(page, url, "log", "peer left")
        assert "event=epoch" not in page.text("#view-log")


def test_an_episode_is_shown_by_turn(page: Browser, stalled: Path) -> None:
    words = ["<user>add 12 and 30<eos><policy>", '<call>{"a": 12}', "<eos>", "<tool>42<eos><policy>", "The sum is 42.", "<eos>"]
    vocab = {word: place for place, word in enumerate(words)}
    (stalled / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    tokens = {"prompt_token_ids": [0], "token_ids": [1, 5, 3, 4, 5], "rollout_log_probs": [-1.0, -0.1, 0.0, -2.0, -0.1]}
    given = {"loss_mask": [1, 1, 0, 1, 1], "advantages": [0.25, 0.25, 0.0, -1.5, -1.5]}
    sample = {"group": 0, "sample": 0, "reward": 1.0, "rewards": {}, "prompt": "12 + 30", "completion": "42", **tokens, **given}
    (stalled / "samples" / "step-000003.jsonl").write_text(json.dumps(sample) + "\n")
    with shown(page, stalled) as url:
        open_tab(page, url, "samples", "The sum is 42.")
        titles = page.evaluate("[...document.querySelectorAll('.chat h3')].map((one) => one.innerText)")
        policy = [f"policy, turn {turn}, advantage {value}" for turn, value in ((1, 0.25), (2, -1.5))]
        assert titles == ["Prompt as the model got it", policy[0], "tools, users, template", policy[1]]
        texts = page.evaluate("[...document.querySelectorAll('.chat .text-block')].map((one) => one.innerText)")
        assert texts == [words[0], words[1] + "<eos>", words[3], "The sum is 42.<eos>"]


def enter(page: Browser, selector: str, value: str) -> None:
    page.evaluate(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)};"
        " one.dispatchEvent(new Event('change')); })()"
    )


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def stalled(tmp_path: Path) -> Path:
    """A run of chats that makes its fifth step, the four before without an update."""
    folder = tmp_path / "run"
    for name in ("samples", "evaluations", "logs", "model"):
        (folder / name).mkdir(parents=True)
    step = {"mean_reward": 0.5, "mean_num_tokens": 2.0, "num_equal_groups": 2, "metrics": {"signal_fraction": 0.0, "loss": 0.5}}
    write_lines(folder / "metrics.jsonl", *({"step": number, **step} for number in range(4)))
    progress = {"activity": "evaluate", "done": 3, "total": 8, "tokens_per_second": 120.0}
    write_lines(folder / "progress.json", {**progress, "step": 4, "steps": 9, "updated_at": 2e10})
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "one <b>two</b>"}]
    first, *others = (
        {
            "group": 0,
            "sample": place,
            "prompt": chat,
            "completion": text,
            "reward": reward,
            "rewards": {"a": reward, "short": 1.0},
        }
        for place, (text, reward) in enumerate([("three", 1.0), ("four", 0.0), ("five", 0.5)])
    )
    tokens = {"prompt_token_ids": [1, 0], "token_ids": [0], "rollout_log_probs": [-1.0]}
    last = {"group": 1, "sample": 0, "reward": 0.0, "rewards": {"a": 0.0, "short": 0.0}}
    write_lines(folder / "samples" / "step-000003.jsonl", first | tokens, *others, last)
    for number, text, reward in ((0, "wrong", 0.0), (4, "right", 1.0)):
        same = {"group": 0, "prompt": "p", "completion": "same", "reward": 1.0}
        changed = {"group": 1, "completion": text, "reward": reward}
        write_lines(folder / "evaluations" / f"step-{number:06d}.jsonl", same, changed)
    added, decoder = [{"id": 1, "content": "<Ġ>"}], {"type": "ByteLevel"}
    write_lines(
        folder / "model" / "tokenizer.json", {"model": {"vocab": {"two": 0}}, "added_tokens": added, "decoder": decoder}
    )
    head = {"id": "r", "policy_version": 0, "recipe": {}, "provenance": {"command": "tasuki train node.toml"}}
    write_lines(folder / "run.json", head)
    shutil.copy(RECORDED / "logs" / "node.toml", folder / "logs")
    shutil.copy(RECORDED / "journal.sqlite", folder)
    lines = ("00:00,000 INFO event=epoch", "00:01,000 ERROR peer left")
    (folder / "logs" / "trainer.log").write_text("".join(f"2026-11-29 01:{line}\n" for line in lines))
    return folder
