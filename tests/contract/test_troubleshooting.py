"""docs/troubleshooting.md has a section for every error reason, under the meaning that docs/grpc.md gives too."""

from __future__ import annotations

import re
from pathlib import Path

from tools import error_pages

DOCS = Path(__file__).parents[2] / "docs"
PAGE = error_pages.TROUBLESHOOTING.read_text()
ADVICE = dict(re.findall(r"^## (.*)\n\n.*\n\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE))


def test_both_pages_have_what_the_errors_say_of_themselves() -> None:
    assert error_pages.troubleshooting_page(PAGE) == PAGE, "run tools/error_pages.py"
    page = error_pages.GRPC.read_text()
    assert error_pages.grpc_page(page) == page, "run tools/error_pages.py"


def test_every_reason_has_one_section_that_says_what_to_do() -> None:
    assert sorted(ADVICE) == sorted(error_pages.known_errors())
    assert PAGE.count("\n## ") == len(ADVICE)
    for reason, advice in ADVICE.items():
        assert advice.strip().endswith(".") and len(advice.split()) > 5 and "\n\n" not in advice.strip(), reason


def test_links_lead_to_pages_and_keys_are_keys() -> None:
    config = (DOCS / "config.md").read_text()
    for link in re.findall(r"\]\(([\w.]+\.md)", PAGE):
        assert (DOCS / link).is_file(), link
    for key in re.findall(r"`((?:trainer|rollout|coordinator|train)(?:\.\w+)+)", PAGE):
        table, _, name = key.rpartition(".")
        assert f"## `[{table}]`" in config and f"| `{name}` |" in config, key
