"""Read edge lists in text: CSV, TSV or blanks, gzipped or not.

A line per edge: source, destination, and maybe a weight; a first line of names may say which column is
which. What follows a # is a comment; in a file that begins with %, what follows a %. Ids are integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from weft.core.errors import GraphError
from weft.graph.data.graph import Graph
from weft.graph.readers.columns import EdgeColumns, named_columns, unnamed_columns
from weft.graph.readers.tables import load_table, open_text


def read_text(path: str | Path, **fields: Any) -> Graph:
    """The graph of an edge list; arguments as ``Graph.from_edges`` (``directed=False`` adds the way back).

    With names in the first line, columns are found by them (src, dst, weight, relation and their usual
    synonyms), the ends being the first two otherwise; without, a third column is the weight.
    """
    path = Path(path)
    layout = find_layout(path)
    arrays = read_edge_table(path, layout)
    _refuse_index(path, layout, arrays)
    stem = Path(path.name.removesuffix(".gz")).stem
    graph = Graph.from_edges(**{"name": stem, **arrays, **fields})
    unread = layout.columns.unread(layout.names)
    return graph.noted(f"{path.name}: columns not read: {', '.join(unread)}") if unread else graph


@dataclass(frozen=True)
class TextLayout:
    """How the lines of one file are to be read."""

    comment: str
    delimiter: str | None
    width: int
    skip: int
    columns: EdgeColumns
    names: tuple[str, ...] = ()

    def wanted(self) -> dict[str, tuple[int, type]]:
        """Position and type of every column that is read."""
        named = {
            "src": (self.columns.src, np.int64),
            "dst": (self.columns.dst, np.int64),
            "edge_weight": (self.columns.weight, np.float64),
            "relation": (self.columns.relation, np.int64),
        }
        return {key: (position, kind) for key, (position, kind) in named.items() if position is not None}


def read_edge_table(path: Path, layout: TextLayout) -> dict[str, np.ndarray]:
    """``src``, ``dst`` and, where the file has them, ``edge_weight`` and ``relation``, each ``[E]``."""
    wanted = layout.wanted()
    try:
        table = load_table(
            path,
            np.dtype([(key, kind) for key, (_, kind) in wanted.items()]),
            delimiter=layout.delimiter,
            comments=layout.comment,
            skiprows=layout.skip,
            usecols=[position for position, _ in wanted.values()],
            ndmin=1,
        )
    except ValueError as error:
        raise _explain(path, layout, error) from None
    return {key: np.ascontiguousarray(table[key]) for key in wanted}


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
        return TextLayout(comment, delimiter, len(head), 0, unnamed_columns(len(head), str(path)))
    if len(first) > 1:
        _refuse_names(path, delimiter, *first[1])
    return TextLayout(comment, delimiter, len(head), number, named_columns(head, str(path)), tuple(head))


def _refuse_index(path: Path, layout: TextLayout, arrays: dict[str, np.ndarray]) -> None:
    """Three columns without names, of which the first counts the lines, are an index and two ends, not a weight."""
    ends = arrays["src"]
    if layout.skip or "edge_weight" not in arrays or len(ends) < 3:
        return
    weight, counting = arrays["edge_weight"], np.arange(len(ends))
    if np.array_equal(ends, counting) and (weight >= 0).all() and (weight == np.floor(weight)).all():
        raise GraphError(
            f"{path}: the first of three columns counts the lines, as an index does that pandas writes; write it with "
            "index=False, or name the columns in a first line: src, dst, weight"
        )


def _content(file: TextIO, comment: str) -> Iterator[tuple[int, str]]:
    """Lines with more than a comment, numbered from 1."""
    for number, line in enumerate(file, start=1):
        kept = line.split(comment, 1)[0].strip()
        if kept:
            yield number, kept


def _fields(line: str, delimiter: str | None) -> list[str]:
    return [field.strip() for field in line.split(delimiter)]


def _parses(field: str, kind: type) -> bool:
    try:
        kind(field)
    except (ValueError, OverflowError):
        return False
    return True


def _refuse_names(path: Path, delimiter: str | None, number: int, line: str) -> None:
    """Where the second line has no number either, the nodes have names instead of ids."""
    if not any(_parses(field, float) for field in _fields(line, delimiter)):
        raise GraphError(
            f"{path} line {number}: {line!r} holds no integer node ids; number the nodes 0, 1, 2, ... first"
        )


def _explain(path: Path, layout: TextLayout, error: ValueError) -> GraphError:
    """Find the line that could not be read and say what is wrong with it."""
    with open_text(path) as file:
        for number, line in _content(file, layout.comment):
            complaint = _complaint(line, layout) if number > layout.skip else None
            if complaint:
                return GraphError(f"{path} line {number}: {complaint}; correct that line")
    return GraphError(f"{path} is not a readable edge list: {error}")


def _complaint(line: str, layout: TextLayout) -> str | None:
    fields = _fields(line, layout.delimiter)
    if len(fields) != layout.width:
        return f"{line!r} has {len(fields)} columns where {layout.width} were expected"
    for key, (position, kind) in layout.wanted().items():
        if not _parses(fields[position], kind):
            what = "a number" if kind is np.float64 else "an integer"
            return f"{key} {fields[position]!r} is not {what}"
    return None
