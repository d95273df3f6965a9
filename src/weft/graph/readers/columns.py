"""Find the columns of a table that are sources, destinations, weights and relations of edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.errors import GraphError

SOURCES = ("src", "source", "from", "u", "head", "node1", "node_1", "id1", "id_1")
TARGETS = ("dst", "target", "dest", "destination", "to", "v", "tail", "node2", "node_2", "id2", "id_2")
WEIGHTS = ("weight", "edge_weight", "w")
RELATIONS = ("relation", "rel", "edge_type", "etype")


@dataclass(frozen=True)
class EdgeColumns:
    """Positions of the columns; None if a table has no such column."""

    src: int
    dst: int
    weight: int | None = None
    relation: int | None = None

    def unread(self, names: Sequence[str]) -> list[str]:
        """The names of the other columns, the index of pandas aside."""
        read = (self.src, self.dst, self.weight, self.relation)
        return [name.strip() for place, name in enumerate(names) if place not in read and not is_index(place, name)]


def is_index(place: int, name: str) -> bool:
    """Whether a column is the index that pandas writes: the first one, without a name."""
    plain = name.strip().strip("\"'").lower()
    return place == 0 and (plain == "" or plain.startswith("unnamed:"))


def unnamed_columns(count: int, where: str) -> EdgeColumns:
    """Without names: source, destination and, third, the weight."""
    if count < 2:
        raise GraphError(f"{where} has {count} column; an edge needs two: source and destination")
    if count > 3:
        raise GraphError(
            f"{where} has {count} columns and no header; name them in a first line: src, dst, weight, relation"
        )
    return EdgeColumns(0, 1, 2 if count == 3 else None)


def named_columns(names: Sequence[str], where: str) -> EdgeColumns:
    """By usual names; when neither end is named as usual, the first two columns are the ends.

    A first column without a name is the index that pandas writes, not an end.
    """
    plain = [name.strip().strip("\"'").lower() for name in names]
    index = int(is_index(0, names[0]))
    if len(plain) - index < 2:
        raise GraphError(f"{where} has the single column {names[0]!r}; an edge needs two: source and destination")
    src, dst = _position(plain, SOURCES), _position(plain, TARGETS)
    if (src is None) != (dst is None):
        known, lacking = ("source", TARGETS) if dst is None else ("destination", SOURCES)
        raise GraphError(
            f"{where}: among the columns {list(names)} only the {known} is recognised; name the other one "
            f"{lacking[0]!r}"
        )
    ends = (index, index + 1) if src is None or dst is None else (src, dst)
    return EdgeColumns(*ends, _position(plain, WEIGHTS), _position(plain, RELATIONS))


def _position(names: Sequence[str], known: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)
