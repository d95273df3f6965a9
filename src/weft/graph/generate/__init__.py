"""Generated graphs: deterministic by seed, built in torch on any device, the same on each.

:func:`citation` plants classes in a power-law graph, :func:`planted_relations` in the relations of its edges.
"""

from weft.graph.generate.citation import citation
from weft.graph.generate.planted_relations import planted_relations

__all__ = ["citation", "planted_relations"]
