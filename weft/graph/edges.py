"""Edge arrays as a user gives them, checked: how many nodes they speak of, their weights and relations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.graph.arrays import as_floats, as_ids, as_vector
from weft.graph.validate import MAX_NODES, check_finite, check_num_nodes, check_range, check_rows


def node_count(num_nodes: int | None, fields: Mapping[str, Any], src: Tensor, dst: Tensor) -> int:
    """N: as given, else the rows of x or y, else the largest id plus one."""
    if num_nodes is None:
        num_nodes = next((fields[key].shape[0] for key in ("x", "y") if fields[key] is not None), None)
    if num_nodes is None:
        num_nodes = 1 + max((int(ids.max()) for ids in (src, dst) if ids.numel()), default=-1)
    check_num_nodes(num_nodes)
    return num_nodes


def edge_values(weight: Any, relation: Any, ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weights and relations ``[E]`` checked, on the device of the edges."""
    if weight is not None:
        weight = as_floats(as_vector(weight, "edge_weight"), "edge_weight").to(ids.device)
        check_rows(weight.numel(), ids.numel(), "edge_weight", "edge")
        check_finite(weight, "edge_weight")
    if relation is not None:
        relation = as_ids(relation, "relation").to(ids.device)
        check_rows(relation.numel(), ids.numel(), "relation", "edge")
        check_range(relation, MAX_NODES, "relation", "relation numbers")
        relation = relation.to(torch.int32)
    return weight, relation
