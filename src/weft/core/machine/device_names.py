"""Names of devices that a run can be given: what is wrong with one, before torch is loaded."""

from __future__ import annotations

import re

from weft.core.errors import SpecError

_NAME = re.compile(r"auto|(cpu|cuda)(:[0-9]+)?")


def check_device_name(name: str) -> None:
    """Refuse what is no device at all; whether it is there is for torch to say."""
    if _NAME.fullmatch(name) is None:
        raise SpecError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
