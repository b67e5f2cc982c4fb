r"""Reward for problems with a checkable answer: the completion's last \boxed{...}, or else its last number, against the row's `answer`."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?")
_FRACTION = re.compile(r"(?<!\d)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_IGNORED = re.compile(r"\\left|\\right|\\[,!;]|[\s$%]|\\text\{[^{}]*\}|\.$")
_MOST_DIGITS = 1000
"""Python refuses to read integers of more than 4,300."""


def correct(completion: str, answer: str | int | float) -> float:
    """1 if the final answers are equal as numbers or, apart from spaces and the like, as texts; else 0."""
    written = (completion, str(answer).rpartition("####")[2])
    completion, wanted = (text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-") for text in written)
    boxed, found = last_boxed(wanted), final_answer(completion)
    return float(found is not None and found == value_of(wanted if boxed is None else boxed))


def final_answer(text: str) -> Fraction | str | None:
    r"""The last \boxed{...}, or else the last number; None without either."""
    boxed, numbers = last_boxed(text), _NUMBER.findall(text)
    return value_of(boxed) if boxed is not None else value_of(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}; None without one, or if it is not closed."""
    start, depth = text.rfind(r"\boxed{"), 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and not depth:
            return text[start + len(r"\boxed{") : place]
    return None


def value_of(text: str) -> Fraction | str:
    plain = _FRACTION.sub(r"\1/\2", _IGNORED.sub("", text.strip()))
    if len(plain) > _MOST_DIGITS or not _NUMBER.fullmatch(plain):
        return plain
    above, _, below = plain.replace(",", "").partition("/")
    return Fraction(above) / int(below or 1) if int(below or 1) else plain
