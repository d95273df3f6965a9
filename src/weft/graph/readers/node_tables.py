"""Read a node table (features, label, split) beside an edge table, both CSV or Parquet, with ids of any kind.

The node table has a column ``id`` (or node, node_id); ``label`` (or y, class, target) and ``split`` (train, val, test
or empty) are optional; every other column is a feature. Ids are compared as text and kept as ``graph.ids``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import GraphError
from weft.graph.graph import Graph
from weft.graph.readers.tables import named_columns, open_text, parquet_table

IDS, LABELS = ("id", "node", "node_id"), ("label", "y", "class", "target")
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
ENDINGS = (".csv", ".tsv", ".csv.gz", ".parquet", ".pq")


@dataclass(frozen=True)
class Table:
    """Columns of text by name; ``places`` says where a row is in the file."""

    path: Path
    columns: dict[str, np.ndarray]
    places: list[str]

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64; a GraphError names the first row without a number."""
        for place, value in zip(self.places, self.columns[name].tolist(), strict=True):
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not np.isfinite(number):
                what = f"is {value!r}, which is not a number" if value else "is empty"
                raise GraphError(f"{self.path} {place}: {name!r} {what}; fill it in, or leave out the column")
        return self.columns[name].astype(np.float64)


def beside(folder: Path, stem: str) -> Path | None:
    """The table called ``stem`` in a folder, None if there is none."""
    return next((folder / (stem + end) for end in ENDINGS if (folder / (stem + end)).is_file()), None)


def read_table(path: Path) -> Table:
    """Every column of a CSV, TSV or Parquet file as text; an empty cell is ""."""
    if path.suffix in (".parquet", ".pq"):
        table = parquet_table(path)
        columns = {
            name: ["" if cell is None else str(cell) for cell in table[name].to_pylist()] for name in table.column_names
        }
        places = [f"row {row}" for row in range(table.num_rows)]
    else:
        with open_text(path) as file:
            reader = csv.reader(file, delimiter="\t" if ".tsv" in path.name else ",", skipinitialspace=True)
            names, rows, places = [name.strip() for name in next(reader, [])], [], []
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise GraphError(
                        f"{path} line {reader.line_num} has {len(cells)} columns where {len(names)} were expected"
                    )
                rows += [cells] if cells else []
                places += [f"line {reader.line_num}"] if cells else []
        columns = {name: [cells[at].strip() for cells in rows] for at, name in enumerate(names)}
    if not places or not columns:
        raise GraphError(f"{path} has no rows below its line of names; give at least one")
    return Table(path, {name: np.array(cells, dtype=np.str_) for name, cells in columns.items()}, places)


def read_tables(path: str | Path, nodes: str | Path | None = None, **fields: Any) -> Graph:
    """The graph of an edge table and a node table; other arguments as ``Graph.from_edges``."""
    path = Path(path)
    edges = read_table(path)
    names = list(edges.columns)
    ends = {
        key: edges.columns[names[at]] for key, at in named_columns(names, str(path)).items() if key in ("src", "dst")
    }
    extra = {key: names[at] for key, at in named_columns(names, str(path)).items() if key not in ends}
    arrays = {key: edges.numbers(name) for key, name in extra.items()}
    if "relation" in arrays:
        arrays["relation"] = arrays["relation"].astype(np.int64)
    if nodes is None:
        ids, notes = np.unique(np.concatenate(list(ends.values()))), []
    else:
        ids, columns, notes = _node_columns(read_table(Path(nodes)))
        arrays |= columns
    order = np.argsort(ids, kind="stable")
    for key, values in ends.items():
        at = np.searchsorted(ids, values, sorter=order).clip(max=len(ids) - 1)
        unknown = np.flatnonzero(ids[order[at]] != values)
        if unknown.size:
            value, place = values[unknown[0]], edges.places[unknown[0]]
            known = "" if nodes is None else f" that {Path(nodes).name} has"
            raise GraphError(f"{path} {place}: {key} {str(value)!r} is no id{known}; add a row for it, or correct it")
        arrays[key] = order[at]
    graph = Graph.from_edges(**{"name": path.parent.name or path.stem, "num_nodes": len(ids), **arrays, **fields})
    graph.ids = ids
    for note in notes:
        graph = graph.noted(note)
    return graph


def _node_columns(table: Table) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    """The ids, arguments of ``Graph.from_edges``, and remarks of a node table."""
    plain = {name.lower(): name for name in table.columns}
    key = next((plain[name] for name in IDS if name in plain), None)
    if key is None:
        raise GraphError(f"{table.path}: none of the columns {list(table.columns)} is the id of a node; name it 'id'")
    ids, seen, notes, fields = table.columns[key], dict[str, str](), [], dict[str, Any]()
    for place, value in zip(table.places, ids.tolist(), strict=True):
        if not value or value in seen:
            what = f"{value!r} is there twice, first in {seen[value]}" if value else "is empty"
            raise GraphError(f"{table.path} {place}: id {what}; give every node one id of its own")
        seen[value] = place
    label = next((plain[name] for name in LABELS if name in plain), None)
    if label is not None:
        values = table.columns[label]
        given = values != ""
        try:
            numbers = np.where(given, values, "nan").astype(np.float64)
            whole = (numbers[given] == np.floor(numbers[given])).all()
            fields["y"] = np.where(given, numbers, -1).astype(np.int64) if whole else numbers
        except ValueError:  # names of classes
            classes, fields["y"] = np.unique(values[given]), np.full(len(values), -1)
            fields["y"][given] = np.searchsorted(classes, values[given])
            shown = ", ".join(f"{number} = {name}" for number, name in enumerate(classes[:20].tolist()))
            notes.append(f"{table.path.name}: classes by name: {shown}{', ...' if len(classes) > 20 else ''}")
    if "split" in plain:
        parts = table.columns[plain["split"]]
        for place, part in zip(table.places, parts.tolist(), strict=True):
            if part and part.lower() not in PARTS:
                raise GraphError(f"{table.path} {place}: split {part!r} must be train, val, test or empty")
        split = np.array([PARTS.get(part.lower(), "") for part in parts.tolist()])
        fields |= {name: split == name for name in ("train", "val", "test")}
    features = [name for name in table.columns if name not in (key, label, plain.get("split"))]
    if features:
        fields["x"] = np.stack([table.numbers(name) for name in features], axis=1).astype(np.float32)
    return ids, fields, notes
