"""Import ``weft.weave`` for plans with woven groups; nothing else imports it."""

from __future__ import annotations

from typing import Any

from weft.core.plan import Plan


def merger_for(plan: Plan) -> Any:
    """What merges the steps of a woven plan; None for every other plan."""
    if plan.join != "woven":
        return None
    from weft.weave.step import Weaver

    return Weaver()
