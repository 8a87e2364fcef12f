"""A table of text with a title and notes, for the terminal, Markdown and the page."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Group
from rich.markup import escape
from rich.table import Table


@dataclass
class Grid:
    """`names` columns at the left are names, the rest are figures; lines with the same first cell belong together."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    names: int = 1

    def terminal(self) -> Group:
        table = Table(title=escape(self.title), title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(escape(name), justify="left" if i < self.names else "right", no_wrap=i < self.names)
        last, grouped = None, len({row[0] for row in self.rows}) < len(self.rows)
        for row in self.rows:
            if grouped and last not in (None, row[0]):
                table.add_section()
            table.add_row(*(escape(cell) for cell in (row if row[0] != last else ["", *row[1:]])))
            last = row[0]
        return Group(table, *(escape(note) for note in self.notes))

    def markdown(self) -> str:
        rule = ["---"] * self.names + ["---:"] * (len(self.header) - self.names)
        lines = [
            "| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [self.header, rule, *self.rows]
        ]
        below = [f"- {note}" for note in self.notes]
        return "\n".join([*lines, *([""] if below else []), *below])
