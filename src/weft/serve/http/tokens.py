"""Who may use the server: tokens and the users they stand for."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.core.errors import SpecError

SHORTEST = 16
OPERATOR = ""


@dataclass(frozen=True)
class Tokens:
    """Tokens by their digest, each with its user; ``open``: everybody is let in (on loopback, if so asked).

    The user ``""`` is the operator, who may change the tasks of all.
    """

    users: Mapping[bytes, str] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """The tokens in a file: one per line, with a user before it (``anna TOKEN``) or alone (the operator's)."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"token file {path}: cannot be read ({error})") from None
        users: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or len(words[-1]) < SHORTEST:
                raise SpecError(f"{path}, line {number}: expected 'USER TOKEN', a token of at least {SHORTEST} letters")
            users[_digest(words[-1])] = words[0] if len(words) == 2 else OPERATOR
        if not users:
            raise SpecError(f"token file {path}: has no token; add a line 'USER TOKEN'")
        return cls(users)

    def user_of(self, token: str) -> str | None:
        """Who ``token`` stands for; None if nobody. Takes the same time however much of it is right."""
        asked, found = _digest(token), None
        for known, user in self.users.items():
            if hmac.compare_digest(known, asked):
                found = user
        return found


def make_token_file(path: Path) -> None:
    """Write a file with a new operator's token, readable by its owner alone; an existing one is kept."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise _no_token(path, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except OSError as error:  # a full disk: half a token would let nobody in
        path.unlink(missing_ok=True)
        raise _no_token(path, error) from None


def _no_token(path: Path, error: OSError) -> SpecError:
    reason = (error.strerror or str(error)).lower()
    return SpecError(f"{path}: no token could be written there ({reason}); free the place, or give a file by --token")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
