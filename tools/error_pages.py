"""Writes the meaning of each error, from tasuki.wire.errors, into docs/reference/grpc.md and docs/guides/troubleshooting.md.

Usage: python tools/error_pages.py
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from tasuki.wire import errors
from tasuki.wire.errors import TasukiError

DOCS = Path(__file__).parents[1] / "docs"
GRPC, TROUBLESHOOTING = DOCS / "reference/grpc.md", DOCS / "guides/troubleshooting.md"
HEAD = "| code | reason | class | meaning; metadata |\n|---|---|---|---|\n"
_TABLE = re.compile(r"^\| code \| reason \|.*\n(\|.*\n)*", re.MULTILINE)
_SECTION = re.compile(r"^## ([A-Z_]+)\n\n.*\n", re.MULTILINE)


def known_errors() -> dict[str, type[TasukiError]]:
    """Returns the error class of each reason, in the order of the module."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TasukiError)]
    return {cls.reason: cls for cls in classes if cls is not TasukiError}


def meaning(cls: type[TasukiError]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def grpc_page(text: str) -> str:
    """Returns the page with its table of errors updated."""
    rows = [f"| {cls.code.name} | `{reason}` | `{cls.__name__}` | {meaning(cls)} |\n" for reason, cls in known_errors().items()]
    page, num_tables = _TABLE.subn(lambda _: HEAD + "".join(rows), text)
    assert num_tables == 1
    return page


def troubleshooting_page(text: str) -> str:
    """Returns the page with each reason's meaning as the first line of its section. Exits unless there is one section per reason."""
    known = known_errors()
    found = _SECTION.findall(text)
    if sorted(found) != sorted(known):
        sys.exit(f"docs/guides/troubleshooting.md needs one section for each of {sorted(set(known) ^ set(found))}")
    return _SECTION.sub(lambda section: f"## {section[1]}\n\n{meaning(known[section[1]])}\n", text)


if __name__ == "__main__":
    GRPC.write_text(grpc_page(GRPC.read_text()))
    TROUBLESHOOTING.write_text(troubleshooting_page(TROUBLESHOOTING.read_text()))
