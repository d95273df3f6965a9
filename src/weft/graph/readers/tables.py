"""Read edge lists: text (CSV, TSV or blanks, gzipped or not) and Parquet.

Text has a line per edge: source, destination, and maybe a weight; a first line of names may say which column is
which. What follows a # is a comment; in a file that begins with %, what follows a %. Ids are integers.
Parquet has a row per edge and is read through pyarrow.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from weft.core.errors import GraphError
from weft.graph.graph import Graph


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, unpacked on the way, without the mark (BOM) that some editors begin it with.

    One that is damaged is one clear error.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        # gzip's own opener, because it also closes the file beneath.
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {error}; it may be truncated or not "
            f"text, fetch or write it again"
        ) from None


def load_table(path: Path, dtype: Any, **options: Any) -> np.ndarray:
    """``np.loadtxt`` of such a file; a field that is no number raises ValueError."""
    with open_text(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input contained no data")
        return np.loadtxt(file, dtype=dtype, **options)


SOURCES = ("src", "source", "from", "u", "head", "node1", "node_1", "id1", "id_1")
TARGETS = ("dst", "target", "dest", "destination", "to", "v", "tail", "node2", "node_2", "id2", "id_2")
WEIGHTS = ("weight", "edge_weight", "w")
RELATIONS = ("relation", "rel", "edge_type", "etype")
KINDS = {"src": np.int64, "dst": np.int64, "edge_weight": np.float64, "relation": np.int64}


def is_index(position: int, name: str) -> bool:
    """Whether a column is the index that pandas writes: the first one, without a name, or one of a name of its own."""
    plain = name.strip().strip("\"'").lower()
    return plain.startswith("__index_level_") or (position == 0 and (plain == "" or plain.startswith("unnamed:")))


def named_columns(names: Sequence[str], where: str) -> dict[str, int]:
    """The positions of the columns of :data:`KINDS` by usual names; of ends without one, the first two columns.

    A first column without a name is the index that pandas writes, not an end.
    """
    plain = [name.strip().strip("\"'").lower() for name in names]
    index = int(is_index(0, names[0]))
    if len(plain) - index < 2:
        raise GraphError(f"{where} has the single column {names[0]!r}; an edge needs two: source and destination")
    usual = {"src": SOURCES, "dst": TARGETS, "edge_weight": WEIGHTS, "relation": RELATIONS}
    firsts = {key: next((name for name in synonyms if name in plain), None) for key, synonyms in usual.items()}
    columns = {key: plain.index(name) for key, name in firsts.items() if name is not None}
    if ("src" in columns) != ("dst" in columns):
        present, lacking = ("source", TARGETS) if "src" in columns else ("destination", SOURCES)
        raise GraphError(
            f"{where}: among the columns {list(names)} only the {present} is recognised; name the other one "
            f"{lacking[0]!r}"
        )
    return {"src": index, "dst": index + 1} | columns


def graph_of(
    arrays: Mapping[str, Any], fields: Mapping[str, Any], path: Path, names: Sequence[str], columns: Mapping[str, int]
) -> Graph:
    """The graph of ``columns`` of a file, with a note on those of ``names`` that were not read; no index of pandas."""
    graph = Graph.from_edges(**{"name": Path(path.name.removesuffix(".gz")).stem, **arrays, **fields})
    unread = [name.strip() for at, name in enumerate(names) if at not in columns.values() and not is_index(at, name)]
    return graph.noted(f"{path.name}: columns not read: {', '.join(unread)}") if unread else graph


def read_text(path: str | Path, **fields: Any) -> Graph:
    """The graph of an edge list; arguments as ``Graph.from_edges`` (``directed=False`` adds the way back).

    With names in the first line, columns are found by them (src, dst, weight, relation and their usual
    synonyms), the ends being the first two otherwise; without, a third column is the weight.
    """
    path = Path(path)
    layout = find_layout(path)
    try:
        table = load_table(
            path,
            np.dtype([(key, KINDS[key]) for key in layout.columns]),
            delimiter=layout.delimiter,
            comments=layout.comment,
            skiprows=layout.skip,
            usecols=list(layout.columns.values()),
            ndmin=1,
        )
    except ValueError as error:
        raise _explain(path, layout, error) from None
    arrays = {key: np.ascontiguousarray(table[key]) for key in layout.columns}
    if not layout.skip and "edge_weight" in arrays and len(table) >= 3:
        # Three columns without names, of which the first counts the lines, are an index and two ends, not a weight.
        weight, counts = arrays["edge_weight"], np.array_equal(arrays["src"], np.arange(len(table)))
        if counts and (weight >= 0).all() and (weight == np.floor(weight)).all():
            raise GraphError(
                f"{path}: the first of three columns counts the lines, as an index does that pandas writes; write it "
                "with index=False, or name the columns in a first line: src, dst, weight"
            )
    return graph_of(arrays, fields, path, layout.names, layout.columns)


@dataclass(frozen=True)
class TextLayout:
    """How the lines of one file are to be read."""

    comment: str
    delimiter: str | None
    width: int
    skip: int
    columns: dict[str, int]  # positions, in the order of KINDS
    names: tuple[str, ...] = ()


def find_layout(path: Path) -> TextLayout:
    """Comment mark, delimiter, header and columns, from the first lines of the file."""
    # One mark per file: numpy's parser is three times slower when it looks for two.
    with open_text(path) as file:
        comment = "%" if next((line for line in file if line.strip()), "").startswith("%") else "#"
    with open_text(path) as file:
        first = list(itertools.islice(_content(file, comment), 2))
    if not first:
        raise GraphError(f"{path} holds no edges, only comments or nothing; give at least one line")
    number, line = first[0]
    delimiter = next((mark for mark in ",;" if mark in line), None)
    head = _fields(line, delimiter)
    if any(_parses(field, float) for field in head):
        if len(head) < 2:
            raise GraphError(f"{path} has {len(head)} column; an edge needs two: source and destination")
        if len(head) > 3:
            raise GraphError(
                f"{path} has {len(head)} columns and no header; name them in a first line: src, dst, weight, relation"
            )
        columns = dict(zip(KINDS, range(len(head)), strict=False))
        return TextLayout(comment, delimiter, len(head), 0, columns)
    if len(first) > 1 and not any(_parses(field, float) for field in _fields(first[1][1], delimiter)):
        raise GraphError(
            f"{path} line {first[1][0]}: {first[1][1]!r} holds no integer node ids; number the nodes 0, 1, 2, ... first"
        )
    return TextLayout(comment, delimiter, len(head), number, named_columns(head, str(path)), tuple(head))


def _content(file: TextIO, comment: str) -> Iterator[tuple[int, str]]:
    """Lines with more than a comment, numbered from 1."""
    for number, line in enumerate(file, start=1):
        content = line.split(comment, 1)[0].strip()
        if content:
            yield number, content


def _fields(line: str, delimiter: str | None) -> list[str]:
    return [field.strip() for field in line.split(delimiter)]


def _parses(field: str, kind: type) -> bool:
    try:
        kind(field)
    except (ValueError, OverflowError):
        return False
    return True


def _explain(path: Path, layout: TextLayout, error: ValueError) -> GraphError:
    """Find the line that could not be read and say what is wrong with it."""
    with open_text(path) as file:
        for number, line in _content(file, layout.comment):
            if number <= layout.skip:
                continue
            fields, complaint = _fields(line, layout.delimiter), None
            if len(fields) != layout.width:
                complaint = f"{line!r} has {len(fields)} columns where {layout.width} were expected"
            else:
                for key, position in layout.columns.items():
                    if not _parses(fields[position], KINDS[key]):
                        expected = "a number" if KINDS[key] is np.float64 else "an integer"
                        complaint = f"{key} {fields[position]!r} is not {expected}"
                        break
            if complaint:
                return GraphError(f"{path} line {number}: {complaint}; correct that line")
    return GraphError(f"{path} is not a readable edge list: {error}")


def parquet_table(path: Path) -> Any:
    """The table of a Parquet file, as pyarrow has it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise GraphError(f"{path}: reading Parquet needs pyarrow: pip install 'weft-gnn[parquet]'") from None
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) is not a readable Parquet file: {error}; "
            f"it may be truncated, fetch or write it again"
        ) from None


def read_parquet(path: str | Path, **fields: Any) -> Graph:
    """The graph of a table with a row per edge.

    Columns are found by name (src, dst, weight, relation and their usual synonyms); where the ends are not
    named so, they are the first two. Other arguments as ``Graph.from_edges``.
    """
    path = Path(path)
    table = parquet_table(path)
    names = table.column_names
    columns, arrays = named_columns(names, str(path)), {}
    for key, position in columns.items():
        column = table.column(position)
        if column.null_count:
            row = int(np.argmin(column.is_valid().to_numpy()))
            raise GraphError(f"{path}: row {row} of column {names[position]!r} is empty; every edge needs a value")
        arrays[key] = column.to_numpy()
        if key in ("src", "dst") and arrays[key].dtype.kind not in "iu":
            sample = arrays[key][:1].tolist()
            raise GraphError(
                f"{path}: column {names[position]!r} holds {arrays[key].dtype} values, for example {sample}; "
                f"node ids must be integers"
            )
    return graph_of(arrays, fields, path, names, columns)
