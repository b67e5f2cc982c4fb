"""Takes the documentation's pictures of the dashboard, light and dark: python -m tests.dashboard_pictures RUN [--view VIEW ...]

The docs show `memory`, `run` and `changeovers` of tests/recorded_run, and `node` and `samples` of a demo in progress. `samples` is taken
from a bfloat16 run, in which log-probs differ. RUN appears in the pictures as given; run this from the folder above RUN, with PYTHONPATH
set.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.browser import Browser, running_browser
from tests.dashboard import served

_IMAGES = Path(__file__).parents[1] / "docs" / "images"
_WIDTH = 1280
_HEIGHTS = {"node": 860, "memory": 740, "run": 1160, "samples": 900, "changeovers": 940}
_READY = {
    "node": "document.querySelector('.ring .is-at, .ring .is-running') && document.querySelector('.events li')",
    "memory": "document.querySelector('#view-memory svg .area')",
    "run": "document.querySelectorAll('#view-run svg .curve').length > 8",
    "samples": "document.querySelector('#view-samples figure svg .curve')",
    "changeovers": "document.querySelector('#view-changeovers .open')",
}
_FAILURE = """(() => { document.querySelector('#view-changeovers input').click();
  return new Promise((done) => setTimeout(() => done([...document.querySelectorAll('.open')].at(-1).click()), 1000)); })()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--view", dest="views", action="append", choices=list(_HEIGHTS), help="such a view alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as browser, served(arguments.run) as server:
        for view in arguments.views or _HEIGHTS:
            for scheme in ("light", "dark"):
                picture = _take(browser, server.url, view, scheme)
                (_IMAGES / f"dashboard-{view}-{scheme}.png").write_bytes(picture)
        browser.open("about:blank#left")


def _take(browser: Browser, url: str, view: str, scheme: str) -> bytes:
    browser.resize(_WIDTH, _HEIGHTS[view])
    browser.prefer(prefers_color_scheme=scheme)
    browser.open(f"{url}&tab={view}")
    browser.until(_READY[view])
    if view == "changeovers":
        browser.evaluate(_FAILURE)
        browser.until("document.querySelector('.detail')")
    browser.evaluate("document.activeElement.blur()")
    return browser.picture()


if __name__ == "__main__":
    main()
