"""Read a plan that ``weft plan --out FILE`` wrote."""

from __future__ import annotations

import os
from pathlib import Path

from weft.core.errors import SpecError
from weft.planner.report.plan_report import PlanReport


def read_plan(path: str | os.PathLike[str]) -> PlanReport:
    """The plan in a file, for :func:`weft.run`; raises :class:`SpecError` for one that is damaged or was changed."""
    place = Path(path)
    if not os.path.isfile(place):
        raise SpecError(f"plan {str(place)!r}: no such file; `weft plan SPEC --out FILE` writes one")
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"plan {str(place)!r}: cannot be read ({error})") from None
    return PlanReport.from_json(text, str(place))
