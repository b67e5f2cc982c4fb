"""Prints tables on a terminal, or as plain lines for files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

# Wide enough that paths of sockets are rarely folded.
_FILE_WIDTH = 140
_INDENT = 4


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table, or on a narrower terminal a list: each row's labels on one line, and its figures with their headings below."""

    table: Table
    num_labels: int
    """Number of columns that name a row. The others hold its figures, or one text without a heading."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _needed_width(self.table, console, options) <= options.max_width:
            yield self.table
            return
        if self.table.title:
            yield Text(str(self.table.title))
        columns = [(Text(str(column.header)), list(_texts(column))) for column in self.table.columns]
        if any(heading for heading, _ in columns):
            yield _joined([heading for heading, _ in columns[: self.num_labels]], " ")
        for number, row in enumerate(self.table.rows):
            labels = [texts[number] for _, texts in columns[: self.num_labels]]
            figures = [_joined([heading, texts[number]], " ") for heading, texts in columns[self.num_labels :] if texts[number]]
            for text, indent in ((_joined(labels, " "), 0), (_joined(figures, ", "), _INDENT)):
                text.stylize_before(row.style or "")
                yield Padding(text, (0, 0, 0, indent), expand=False)


def _texts(column: Column) -> Iterator[Text]:
    """Cells of a column. A bar, which only illustrates figures, is empty."""
    for cell in column.cells:
        yield cell.copy() if isinstance(cell, Text) else Text(cell if isinstance(cell, str) else "")


def _joined(texts: list[Text], separator: str) -> Text:
    return Text(separator).join(text for text in texts if text)


def _needed_width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """Least width at which a table cuts no cell, and leaves each column its `min_width`."""
    wide = options.update(width=10_000)
    width = sum(_column_width(column, console, wide) for column in table.columns)
    _, right, _, left = table.padding
    return width + (left + right) * (len(table.columns) - 1)


def _column_width(column: Column, console: Console, options: ConsoleOptions) -> int:
    texts = [cell for cell in (column.header, *column.cells) if isinstance(cell, str | Text)]  # a bar fits any width
    sizes = [Measurement.get(console, options, text) for text in texts]
    return max(column.min_width or 1, *(size.maximum if column.no_wrap else size.minimum for size in sizes))


def print_text(text: RenderableType) -> None:
    """Prints to stdout. Elsewhere than on a terminal, lines are 140 wide at most, without trailing spaces."""
    if Console().is_terminal:
        Console().print(text, highlight=False)
        return
    console = Console(width=_FILE_WIDTH)
    with console.capture() as captured:
        console.print(text, highlight=False)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
