"""Writes codes, classes and meanings of the errors, from tasuki.wire.errors, into docs/reference/errors.md."""

import inspect
import re
import sys

from tasuki.wire import errors
from tasuki.wire.errors import TasukiError

_ROW = re.compile(r"^\| `([A-Z_]+)` \| .* \| (.*) \|\n", re.MULTILINE)


def known_errors() -> dict[str, type[TasukiError]]:
    """Returns the error class of each reason, in the order of the module."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TasukiError)]
    return {cls.reason: cls for cls in classes if cls is not TasukiError}


def page(text: str) -> str:
    """Returns the page with its table current. What to do, the last column, stays as it is. Exits unless each reason has one row."""
    known = known_errors()
    found = [reason for reason, _ in _ROW.findall(text)]
    if sorted(found) != sorted(known):
        sys.exit(f"docs/reference/errors.md needs one row for each of {sorted(set(known) ^ set(found))}")
    return _ROW.sub(lambda row: _row(known[row[1]], row[2]), text)


def _row(cls: type[TasukiError], advice: str) -> str:
    meaning = " ".join((inspect.getdoc(cls) or "").split())
    return f"| `{cls.reason}` | `{cls.__name__}`, {cls.code.name} | {meaning} | {advice} |\n"
