"""docs/api.md is generated from the client's signatures and docstrings, and every public name has one."""

from __future__ import annotations

import re
from pathlib import Path

from tasuki.wire import errors
from tools import api_page

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_page_is_what_the_docstrings_say() -> None:
    assert api_page.page() == PAGE, "run tools/api_page.py"


def test_every_public_name_and_verb_has_a_docstring() -> None:
    assert api_page.undocumented() == []


def test_errors_of_the_page_are_errors_of_ours() -> None:
    named = {
        name for text in re.findall(r"Raises ([^.]*)\.", PAGE) for name in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", text)
    }
    named -= set(dict(api_page.public_names()))
    assert {"OutOfGpuMemory", "NoGradients", "PathExists"} <= named
    assert named <= set(vars(errors)) | {"SettingError"}
