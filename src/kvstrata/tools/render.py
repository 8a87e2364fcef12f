"""Text tables: for the terminal, for Markdown between markers in a document, and for the results page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rich.console import Group
from rich.markup import escape
from rich.table import Table


@dataclass
class Grid:
    """A table: the first ``names`` columns are names, the others numbers; rows with the same first cell form a group.

    ``title`` is the caption: above the table in the terminal, below it in a document.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    labels: int = 1

    def terminal(self) -> Group:
        table = Table(title=escape(self.title), title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(escape(name), justify="left" if i < self.labels else "right", no_wrap=i < self.labels)
        last, grouped = None, len({row[0] for row in self.rows}) < len(self.rows)
        for row in self.rows:
            if grouped and last not in (None, row[0]):
                table.add_section()
            table.add_row(*(escape(cell) for cell in (row if row[0] != last else ["", *row[1:]])))
            last = row[0]
        return Group(table, *(escape(note) for note in self.notes))

    def markdown(self) -> str:
        rule = ["---"] * self.labels + ["---:"] * (len(self.header) - self.labels)
        lines = [
            "| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [self.header, rule, *self.rows]
        ]
        below = [f"- {note}" for note in self.notes]
        return "\n".join([*lines, *([""] if below else []), *below])

    def document(self) -> str:
        """Markdown with the title below the table, as in documents."""
        return f"{self.markdown()}\n\n<sub>{self.title}.</sub>"


def inject(text: str, marker: str, table: str | Callable[[dict[str, str]], str], options: Collection[str]) -> str:
    """Replace every block between ``<!-- marker key=value .. -->`` and ``<!-- /marker -->``.

    ``table`` is the new text, or a function from the block's options to it; ``options`` are the keys it may have.
    """
    name = re.escape(marker)
    begins, ends = (len(re.findall(rf"<!--\s*{slash}{name}(?=\s)", text)) for slash in ("", "/"))
    if begins != ends or not begins:
        raise ValueError(f"{marker}: {begins} opening and {ends} closing markers")

    def fill(match: re.Match[str]) -> str:
        body = table if isinstance(table, str) else table(_options(match.group(2), options))
        return f"{match.group(1)}\n{body}\n{match.group(3)}"

    pattern = rf"(<!--\s*{name}(?=\s)(.*?)-->).*?(<!--\s*/{name}\s*-->)"
    return re.sub(pattern, fill, text, flags=re.DOTALL)


def _options(text: str, known: Collection[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(text)]
    if unknown := [key for key, sep, value in pairs if key not in known or not value]:
        raise ValueError(f"marker option {unknown[0]!r}: expected one of {', '.join(sorted(known))}, as key=value")
    return {key: value for key, _, value in pairs}
