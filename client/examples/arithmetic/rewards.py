"""Rewards of the example. Only the correct number is trained for; the form guides the first steps."""

import re

_EQUATION = re.compile(r"\d+ \+ \d+ = \d+")
_FINAL = re.compile(r"####\s*(-?[\d,.]*\d)")


def exact(*, completion: str, answer: str) -> float:
    """1 if the text after the last equals sign, or the whole text without one, is the answer; else 0."""
    return float(completion.rpartition("=")[2].strip() == answer)


def form(*, completion: str) -> float:
    """1 for a single equation such as "12 + 34 = 5" and nothing else, correct or not."""
    return float(_EQUATION.fullmatch(completion.strip()) is not None)


def gsm8k_exact(*, completion: str, answer: str) -> float:
    """1 if the number after the last `####` is the answer, else 0."""
    return float(final_number(completion) == final_number(f"#### {answer}"))


def gsm8k_form(*, completion: str) -> float:
    """1 if there is a number after `####`."""
    return float(final_number(completion) is not None)


def final_number(text: str) -> str | None:
    """The number after the last `####`, without commas; None without one."""
    found = _FINAL.findall(text)
    return found[-1].replace(",", "") if found else None
