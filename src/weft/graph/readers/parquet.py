"""Read edge lists in Parquet, through pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import GraphError
from weft.graph.graph import Graph
from weft.graph.readers.text import named_columns


def read_parquet(path: str | Path, **fields: Any) -> Graph:
    """The graph of a table with a row per edge.

    Columns are found by name (src, dst, weight, relation and their usual synonyms); where the ends are not
    named so, they are the first two. Other arguments as ``Graph.from_edges``.
    """
    path = Path(path)
    names, table = _load(path)
    columns = named_columns(names, str(path))
    wanted = {
        "src": columns.src,
        "dst": columns.dst,
        "edge_weight": columns.weight,
        "relation": columns.relation,
    }
    arrays = {key: _column(table, at, path) for key, at in wanted.items() if at is not None}
    for key in ("src", "dst"):
        if arrays[key].dtype.kind not in "iu":
            column, sample = names[wanted[key]], arrays[key][:1].tolist()
            raise GraphError(
                f"{path}: column {column!r} holds {arrays[key].dtype} values, for example {sample}; "
                f"node ids must be integers"
            )
    graph = Graph.from_edges(**{"name": path.stem, **arrays, **fields})
    unread = columns.unread(names)
    return graph.noted(f"{path.name}: columns not read: {', '.join(unread)}") if unread else graph


def _load(path: Path) -> tuple[list[str], Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise GraphError(f"{path}: reading Parquet needs pyarrow: pip install 'weft-gnn[parquet]'") from None
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) is not a readable Parquet file: {error}; "
            f"it may be truncated, fetch or write it again"
        ) from None
    return table.column_names, table


def _column(table: Any, position: int, path: Path) -> np.ndarray:
    column = table.column(position)
    if column.null_count:
        valid = column.is_valid().to_numpy()
        raise GraphError(
            f"{path}: row {int(np.argmin(valid))} of column {table.column_names[position]!r} is empty; "
            f"every edge needs a value"
        )
    return column.to_numpy()
