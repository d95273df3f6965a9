"""Loggers to tables: ``csv:FILE`` has a row per epoch of every member, ``NAME.members.csv`` beside it one per member.

A file may hold several runs. The rows of a run that is resumed are written anew, those of others stay.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.files import replacing
from weft.engine.loggers.tracker import Rows, Tracked, Tracker, in_cells

FIRST = ("run", "sweep", "task")  # columns of every table


class Table:
    """A CSV file that grows by rows, and by columns."""

    def __init__(self, path: Path) -> None:
        self.path, self._columns, self._run = path, list(FIRST), ""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with open(path, newline="", encoding="utf-8", errors="replace") as file:
                self._columns = next(csv.reader(file), self._columns)
        if self._columns[:3] != list(FIRST):
            raise SpecError(f"{path} is no table of a former log; choose another file")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of one run; before its first ones, drop those that a process before has written of it."""
        columns = list(dict.fromkeys((*self._columns, *(name for row in rows for name in row))))
        run = rows[0]["run"] if rows else self._run
        if run != self._run or columns != self._columns:
            with replacing(self.path) as partial:
                self._copy(partial, columns, without=run if run != self._run else "")
            self._columns, self._run = columns, run
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerows(rows)

    def _copy(self, target: Path, columns: Sequence[str], without: str) -> None:
        self.path.touch()
        with (
            open(self.path, newline="", encoding="utf-8") as old,
            open(target, "w", newline="", encoding="utf-8") as new,
        ):
            writer = csv.DictWriter(new, columns)
            writer.writeheader()
            writer.writerows(row for row in csv.DictReader(old) if row["run"] != without)


class CsvLogger(Tracker):
    """Appends epochs to one table as they come, and a row per member to another when it ends."""

    rebuilds = True

    def __init__(self, where: str) -> None:
        super().__init__()
        path = Path(where).expanduser()
        self._epochs, self._members = Table(path), Table(of_members(path))
        self._last: dict[str, dict[str, Any]] = {}  # row of every member, not written yet: callbacks may log beside it

    def log(self, member: Tracked, rows: Rows, time: float) -> None:
        table = [self._last[member.name]] if member.name in self._last else []
        for epoch, values in rows:
            if table and table[-1]["epoch"] == epoch:
                table[-1] |= values
            else:
                table.append({**first_cells(member), "epoch": epoch, **in_cells(member.varying), **values})
        self._last[member.name] = table.pop()
        self._epochs.add(table)

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        self._epochs.add([self._last.pop(member.name)] if member.name in self._last else [])
        self._members.add([{**first_cells(member), **texts, **final, **in_cells(member.settings)}])

    def close(self) -> None:
        self._epochs.add(list(self._last.values()))
        self._last.clear()


class ParquetLogger(CsvLogger):
    """The same tables as Parquet, written when the run ends; while it trains, they grow as CSV files beside them."""

    def __init__(self, where: str) -> None:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

        self._arrow, path = pyarrow, Path(where).expanduser()
        growing = path.with_name(f".{path.name}.csv")
        self._pairs = ((path, growing), (of_members(path), of_members(growing)))
        for target, table in self._pairs:
            if target.exists() and not table.exists():
                pyarrow.csv.write_csv(pyarrow.parquet.read_table(target), table)
        super().__init__(str(growing))

    def close(self) -> None:
        super().close()
        text = self._arrow.csv.ConvertOptions(column_types=dict.fromkeys(FIRST, self._arrow.string()))
        for target, table in self._pairs:
            if table.exists():
                with replacing(target) as partial:
                    self._arrow.parquet.write_table(self._arrow.csv.read_csv(table, convert_options=text), partial)
                table.unlink()


def of_members(path: Path) -> Path:
    """The table of members beside that of epochs."""
    return path.with_name(f"{path.stem}.members{path.suffix}")


def first_cells(member: Tracked) -> dict[str, str]:
    """The cells of :data:`FIRST`."""
    return dict(zip(FIRST, (member.run, member.group, member.name), strict=True))
