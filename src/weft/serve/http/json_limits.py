"""Read JSON from strangers: bounded in size and depth, finite numbers, text that can be stored."""

from __future__ import annotations

import json
import re
from typing import Any

from weft.core.errors import InputError

MOST_BYTES = 4 << 20
MOST_DEPTH = 32
LARGEST = 2**63 - 1
# A text that does not end goes on to the end of the body: looked for again from each of its quotes it would take hours.
TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class BadRequestError(InputError):
    """What was sent cannot be used; ``status`` is the HTTP status to answer with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def read_json(body: bytes, most_bytes: int = MOST_BYTES) -> Any:
    """The value in ``body``; a :class:`BadRequestError` for anything that is too large, too deep or no JSON."""
    if len(body) > most_bytes:
        raise BadRequestError(f"the body has {len(body):,} bytes; at most {most_bytes:,} are read", 413)
    check_depth(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON ({str(error)[:200]})") from None
    check_values(value)
    return value


def check_depth(body: bytes) -> None:
    """Refuse brackets nested too deep, before a parser goes down into them."""
    depth = 0
    for token in TEXT_OR_BRACKET.finditer(body):
        first = body[token.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MOST_DEPTH:
            raise BadRequestError(f"the body nests more than {MOST_DEPTH} levels deep")


def check_values(value: Any) -> None:
    """Refuse numbers and text that the queue cannot hold."""
    if isinstance(value, str):
        if "\x00" in value or not _encodable(value):
            raise BadRequestError(f"the text {value[:40]!r} has characters that cannot be stored")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise BadRequestError("a number is too large")
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise BadRequestError("a number is too large")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_values(key)
            check_values(item)
    elif isinstance(value, list):
        for item in value:
            check_values(item)


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
