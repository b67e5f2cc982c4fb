"""docs/troubleshooting.md has an answer for every reason that an error can have, under what docs/grpc.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.contract.test_docs import ERRORS
from tests.contract.test_docs import PAGE as GRPC_PAGE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
SECTIONS = {
    title: body.strip().split("\n\n") for title, body in re.findall(r"^## (.*)\n\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE)
}


def test_every_reason_has_one_section_and_nothing_else_has_any() -> None:
    assert sorted(SECTIONS) == sorted({error.reason for error in ERRORS})
    assert PAGE.count("\n## ") == len(SECTIONS)


def test_a_section_begins_with_the_meaning_of_the_error_table_and_goes_on_with_what_to_do() -> None:
    meanings = dict(re.findall(r"^\| [A-Z_]+ \| `([A-Z_]+)` \| `\w+` \| (.*) \|$", GRPC_PAGE, re.MULTILINE))
    for reason, paragraphs in SECTIONS.items():
        meaning, advice = paragraphs
        assert meaning == meanings[reason], reason
        assert advice.endswith(".") and len(advice.split()) > 5, reason


def test_links_lead_to_pages_and_keys_are_keys() -> None:
    config = (DOCS / "config.md").read_text()
    for link in re.findall(r"\]\(([\w.]+\.md)", PAGE):
        assert (DOCS / link).is_file(), link
    for key in re.findall(r"`((?:trainer|rollout|coordinator|train)(?:\.\w+)+)", PAGE):
        table, _, name = key.rpartition(".")
        assert f"## `[{table}]`" in config and f"| `{name}` |" in config, key
