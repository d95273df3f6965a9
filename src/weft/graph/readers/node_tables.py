"""Read a node table (features, label, split) next to an edge table, both CSV or Parquet, with ids of any kind.

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
from weft.graph.readers.tables import graph_of, is_index, named_columns, open_text, parquet_table

IDS, LABELS = ("id", "node", "node_id"), ("label", "y", "class", "target")
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LONGEST_ID = 1_000  # characters: an array of text has the room of the longest for each
ENDINGS = (".csv", ".tsv", ".csv.gz", ".parquet", ".pq")


@dataclass(frozen=True)
class Table:
    """Columns of text by name; ``places`` says where a row is in the file."""

    path: Path
    columns: dict[str, list[str]]  # no arrays of text: in those every cell takes the room of the longest
    places: list[str]

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64; a GraphError names the first row without a number."""
        for place, value in zip(self.places, self.columns[name], strict=True):
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not np.isfinite(number):
                what = f"is {value[:80]!r}, which is not a number" if value else "is empty"
                raise GraphError(f"{self.path} {place}: {name!r} {what}; fill it in, or leave out the column")
        return np.array(self.columns[name], dtype=np.float64)


def beside(folder: Path, stem: str) -> Path | None:
    """The table called ``stem`` in a folder, None if there is none."""
    return next((folder / (stem + end) for end in ENDINGS if (folder / (stem + end)).is_file()), None)


def read_table(path: Path) -> Table:
    """Every column of a CSV, TSV or Parquet file as text; an empty cell is "", and the index of pandas is left out."""
    if path.suffix in (".parquet", ".pq"):
        table = parquet_table(path)
        names, places = table.column_names, [f"row {row}" for row in range(table.num_rows)]
        cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    else:
        with open_text(path) as file:
            reader = csv.reader(file, delimiter="\t" if ".tsv" in path.name else ",", skipinitialspace=True)
            names, rows, places = [name.strip() for name in next(reader, [])], [], []
            for line in reader:
                if line and len(line) != len(names):
                    raise GraphError(
                        f"{path} line {reader.line_num} has {len(line)} columns where {len(names)} were expected"
                    )
                rows += [line] if line else []
                places += [f"line {reader.line_num}"] if line else []
        cells = [[line[at].strip() for line in rows] for at in range(len(names))]
    if not places or not names:
        raise GraphError(f"{path} has no rows below its line of names; give at least one")
    columns = dict(zip(names, cells, strict=True))
    if len(columns) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise GraphError(f"{path} has two columns {twice!r}; give each a name of its own")
    return Table(path, {name: columns[name] for at, name in enumerate(names) if not is_index(at, name)}, places)


def read_tables(path: str | Path, nodes: str | Path | None = None, **fields: Any) -> Graph:
    """The graph of an edge table and a node table; other arguments as ``Graph.from_edges``."""
    path = Path(path)
    edges = read_table(path)
    names = list(edges.columns)
    at = named_columns(names, str(path))
    ends = {key: edges.columns[names[at[key]]] for key in ("src", "dst")}
    arrays: dict[str, Any] = {key: edges.numbers(names[at[key]]) for key in at if key not in ends}
    if nodes is None:
        ids, notes = sorted({*ends["src"], *ends["dst"]}), []
    else:
        ids, columns, notes = _node_columns(read_table(Path(nodes)))
        arrays |= columns
    if (longest := max(map(len, ids))) > LONGEST_ID:
        raise GraphError(f"{nodes or path}: an id has {longest:,} characters; at most {LONGEST_ID} are read")
    number = {name: row for row, name in enumerate(ids)}
    if number.keys() >= {names[at["src"]], names[at["dst"]]}:
        raise GraphError(f"{path}: its first line is an edge; add a line of names above it: source,target")
    for key, values in ends.items():
        arrays[key] = np.array([number.get(value, -1) for value in values], dtype=np.int64)
        if (arrays[key] < 0).any():
            value, place = values[row := int(arrays[key].argmin())][:80], edges.places[row]
            which = "" if nodes is None else f" that {Path(nodes).name} has"
            raise GraphError(f"{path} {place}: {key} {value!r} is no id{which}; add a row for it, or correct it")
    if "relation" in arrays and not (arrays["relation"] % 1).any():  # else they are refused, as ids must be whole
        arrays["relation"] = arrays["relation"].astype(np.int64)
    own = {"name": path.parent.name or path.stem, "num_nodes": len(ids)}
    graph = graph_of(own | arrays, fields, path, names, at)
    graph.ids, graph.notes = np.array(ids, dtype=np.str_), (*notes, *graph.notes)
    return graph


def _node_columns(table: Table) -> tuple[list[str], dict[str, Any], list[str]]:
    """The ids, arguments of ``Graph.from_edges``, and remarks of a node table."""
    plain = {name.lower(): name for name in table.columns}
    for words, noun in ((IDS, "the id of a node"), (LABELS, "its label")):  # else one of them would be a feature
        if len(both := [name for name in table.columns if name.lower() in words]) > 1:
            raise GraphError(
                f"{table.path}: {both[0]!r} and {both[1]!r} can both be {noun}; rename or leave out one of the columns"
            )
    key = next((plain[name] for name in IDS if name in plain), None)
    if key is None:
        names = str(list(table.columns))[:200]
        raise GraphError(f"{table.path}: none of the columns {names} is the id of a node; name it 'id'")
    ids, seen, notes, fields = table.columns[key], dict[str, str](), [], dict[str, Any]()
    for place, value in zip(table.places, ids, strict=True):
        if not value or value in seen:
            what = f"{value[:80]!r} is there twice, first in {seen[value]}" if value else "is empty"
            raise GraphError(f"{table.path} {place}: id {what}; give every node one id of its own")
        seen[value] = place
    label = next((plain[name] for name in LABELS if name in plain), None)
    if label is not None:
        values = ["" if value.lower() == "nan" else value for value in table.columns[label]]
        try:
            numbers = np.array([value or "nan" for value in values], dtype=np.float64)
            numbered = numbers[~np.isnan(numbers)]
            whole = ((numbered == np.floor(numbered)) & (abs(numbered) < 2**53)).all()
            fields["y"] = np.nan_to_num(numbers, nan=-1).astype(np.int64) if whole else numbers
        except ValueError:  # names of classes
            classes = sorted({*values} - {""})
            position_of = {name: position for position, name in enumerate(classes)}
            fields["y"] = np.array([position_of.get(value, -1) for value in values])
            shown = ", ".join(f"{position} = {name[:80]}" for position, name in enumerate(classes[:20]))
            notes.append(f"{table.path.name}: classes by name: {shown}{', ...' if len(classes) > 20 else ''}")
    if "split" in plain:
        parts = table.columns[plain["split"]]
        for place, part in zip(table.places, parts, strict=True):
            if part and part.lower() not in PARTS:
                raise GraphError(f"{table.path} {place}: split {part[:80]!r} must be train, val, test or empty")
        split = np.array([PARTS.get(part.lower(), "") for part in parts])
        fields |= {name: split == name for name in ("train", "val", "test")}
    features = [name for name in table.columns if name not in (key, label, plain.get("split"))]
    if features:
        fields["x"] = np.stack([table.numbers(name) for name in features], axis=1).astype(np.float32)
    return ids, fields, notes
