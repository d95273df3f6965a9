"""How generated graphs choose the nodes to train, validate and test on."""

from __future__ import annotations

PLANETOID = "planetoid"
PER_CLASS, PLANETOID_VAL, PLANETOID_TEST = 20, 500, 1000
SHARES = (0.6, 0.2, 0.2)

SplitRule = str | tuple[float, float, float] | tuple[int, int, int]
