"""Prints the lines of each room, without generated code, beside its limit and its goal in tools/lines.toml; fails above a limit.

Usage: python -m tools.lines [--renew], which sets limits to the present lines. Rooms may take lines from each other; the sum falls.
"""

import argparse
import sys
import tomllib
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_BUDGETS = Path(__file__).with_suffix(".toml")
_STEP = 50
"""Limits are multiples of this number of lines."""
_PRODUCT, _FILES = "services and client", "files of services"
_HEAD = (
    "# Lines that a room may have, and files of services. Written by `python -m tools.lines --renew`; their sum only falls.\n"
)


def _sources() -> list[Path]:
    folders = (_ROOT / folder for folder in ("services", "client", "protos/tasuki/wire", "csrc", "tests", "tools"))
    found = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".js", ".cpp", ".h", ".cu"))
    return [
        path
        for path in found
        if "_pb2" not in path.name and not path.is_symlink() and not {"node_modules", "build"} & set(path.parts)
    ]


def _room(path: Path) -> str:
    match path.relative_to(_ROOT).parts:
        case ("services", "tasuki", package, folder, *rest) if rest and package in ("trainer", "cli"):
            return f"services/{package}/{folder}"
        case ("services", "tasuki", package, *_):
            return f"services/{package}"
        case ("tools", "bench", *_):
            return "tools/bench"
        case (folder, *_):
            return folder
        case _:
            raise AssertionError(path)


def measured() -> dict[str, int]:
    """Returns lines by room, those of services and client together, and the number of services' Python files."""
    lines: Counter[str] = Counter()
    for path in _sources():
        lines[_room(path)] += len(path.read_bytes().splitlines())
    product = sum(count for room, count in lines.items() if room.partition("/")[0] in ("services", "client"))
    files = sum(path.is_relative_to(_ROOT / "services") and path.suffix == ".py" for path in _sources())
    return {**dict(sorted(lines.items())), _PRODUCT: product, _FILES: files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="set the limits to the present figures")
    renew = parser.parse_args().renew
    budgets: dict[str, dict[str, int]] = tomllib.loads(_BUDGETS.read_text())
    found = measured()
    grown = []
    for name, count in found.items():
        limit = budgets.get(name, {}).get("limit", 0)
        if renew and name.partition("/")[0] in ("services", "client"):
            limit = max(limit, count)
        if count > limit:
            grown.append(f"{name} has {count:,}, more than its limit of {limit:,}")
        goal = budgets.get(name, {}).get("goal")
        sys.stdout.write(f"{name:<30} {count:>8,} {limit:>8,} {'' if goal is None else f'{goal:>8,}'}\n")
    if grown:
        sys.exit("\n".join(grown))
    if renew:
        rows = []
        for name, count in found.items():
            rounded = count if name == _FILES else -(-count // _STEP) * _STEP
            kept = budgets.get(name, {})
            goal = f", goal = {kept['goal']}" if "goal" in kept else ""
            limit = min(rounded, kept["limit"]) if name in (_PRODUCT, _FILES) else rounded
            rows.append(f'"{name}" = {{limit = {limit}{goal}}}\n')
        _BUDGETS.write_text(_HEAD + "".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
