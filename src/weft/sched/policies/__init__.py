"""Scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.core.errors import SpecError
from weft.core.suggest import nearest_names
from weft.sched.policies.backfill import Backfill
from weft.sched.policies.base import Base
from weft.sched.policies.bmc import BMC
from weft.sched.policies.lmcf import LMCF
from weft.sched.policies.mps_no_admission import MPSNoAdmission
from weft.sched.policies.pipeswitch_like import PipeSwitchLike
from weft.sched.policies.policy import Policy
from weft.sched.policies.sequential import Sequential

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "sequential": Sequential,
        "mps": MPSNoAdmission,
        "pipeswitch": PipeSwitchLike,
        "base": Base,
        "lmcf": LMCF,
        "bmc": BMC,
        "backfill": Backfill,
    }
)
DEFAULT_POLICY = "backfill"


def find_policy(name: str) -> Policy:
    """The policy of that name with its default settings (letter case does not count)."""
    made = POLICIES.get(name.lower())
    if made is None:
        known = ", ".join(POLICIES)
        raise SpecError(f"there is no policy {name!r}{nearest_names(name, POLICIES)}; choose one of {known}")
    return made()
