"""What an operator's schema says: which arguments it writes, and which operators make the host wait for a value."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

aten = torch.ops.aten
HOST_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


@cache
def written_places(target: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that ``target`` writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    written = (argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    pairs = zip(enumerate(schema.arguments), written, strict=True)
    return tuple((place, argument.name) for (place, argument), writes in pairs if writes)
