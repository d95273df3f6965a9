"""Parse and format bytes and seconds: ``"24GiB"``, ``"1.4 GiB"``, ``"0.94 ms"``."""

from __future__ import annotations

import math
import re

from weft.core.errors import SpecError
from weft.core.wording import option

BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
MOST_BYTES = 2.0**63  # fewer than that
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(value: str | float, what: str = "budget") -> int:
    """``"24GiB"``, ``"24 GB"``, ``"500M"`` or a number of bytes, as bytes; ``24G`` is short for ``24GiB``.

    ``KB``, ``MB``, ``GB``, ``TB`` are powers of 1000; ``KiB`` ... and the bare letters are powers of 1024.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        too_long = isinstance(value, int) and value.bit_length() > 1000  # for a float
        amount = MOST_BYTES if too_long else float(value)
    else:
        match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise SpecError(
                f"{option(what, value)} is not an amount of memory; write it like 24GiB, 500MB or 16000000000"
            )
        number, letter, binary = match.groups()
        decimal = str(value).strip().lower().endswith("b") and not binary and bool(letter)
        amount = float(number) * (DECIMAL if decimal else BINARY)[letter.lower()]
    if not math.isfinite(amount) or amount < 1:
        raise SpecError(f"{option(what, value)} must be at least one byte; write it like 24GiB")
    if amount >= MOST_BYTES:
        raise SpecError(f"{option(what, value)} is more memory than there is; write it like 24GiB")
    return int(amount)


def show_bytes(amount: float) -> str:
    """``1503238553`` as ``"1.40 GiB"``: three digits and the binary unit that gives them."""
    size = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return _three_digits(size, unit, exact=unit == "B")
        size /= 1024
    return _three_digits(size, "TiB")


def show_seconds(amount: float) -> str:
    """``0.000937`` as ``"937 us"``: three digits and the unit that gives them."""
    if amount >= 100:
        minutes = amount / 60
        if minutes < 100:
            return f"{minutes:.1f} min"
        hours = minutes / 60
        return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
    unit, factor = ("s", 1.0) if amount >= 1 else ("ms", 1e3) if amount * 1e3 >= 1 else ("us", 1e6)
    return _three_digits(amount * factor, unit)


def show_loss(value: float) -> str:
    """Four decimals, in powers of ten where that would be longer than a column: ``3.46e+20``."""
    return f"{value:.4f}" if abs(value) < 1e5 or not math.isfinite(value) else f"{value:.3g}"


def _three_digits(size: float, unit: str, exact: bool = False) -> str:
    if exact or abs(size) >= 99.95:
        return f"{size:.0f} {unit}"
    return f"{size:.1f} {unit}" if abs(size) >= 9.995 else f"{size:.2f} {unit}"
