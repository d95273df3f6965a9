"""Scheduling policies by name: Weft's own, and those of entry points in ``weft.policies``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.core.errors import SpecError
from weft.core.plugins import blame_plugin, load_plugin, plugin_names
from weft.core.wording import nearest_names
from weft.sched.admission import Policy
from weft.sched.backfill import Backfill
from weft.sched.baselines import BMC, LMCF, Base, MPSNoAdmission, PipeSwitchLike, Sequential

POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
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


def find_policy(name: str, fuse: bool | None = None) -> Policy:
    """The policy of that name with its default settings (letter case does not count).

    ``fuse``: whether it starts tasks that can be fused as one group; None: as it does by default.
    """
    made = POLICIES.get(name.lower()) or load_plugin("policies", name)
    if made is None:
        names = (*POLICIES, *plugin_names("policies"))
        raise SpecError(f"there is no policy {name!r}{nearest_names(name, names)}; choose one of {', '.join(names)}")
    if name.lower() in POLICIES:
        return made() if fuse is None else made(fuse=fuse)
    with blame_plugin("policies", name):
        policy: Policy = made() if fuse is None else made(fuse=fuse)
    if not callable(getattr(policy, "schedule", None)):
        raise SpecError(f"policy {name!r}: the entry point in weft.policies makes {policy!r}, which has no schedule()")
    return policy
