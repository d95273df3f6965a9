"""Text of others on a terminal: what would move the cursor, change colours or the window's title is spelled out."""

from __future__ import annotations

import unicodedata

SPELLED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control characters, directions of writing, lines within a line
KEPT = "\u200c\u200d"  # joiners, which words of some languages and emoji need


def plain_line(text: str) -> str:
    """``text`` on one line, with escapes such as ``\\x1b`` in place of what a terminal would carry out."""
    return text if text.isascii() and text.isprintable() else "".join(map(_spelled, text))


def plain_text(text: str) -> str:
    """The same, with its lines and tabs; what overwrites a line, as progress bars do, begins another one."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("\t".join(plain_line(part) for part in line.split("\t")) for line in lines)


def _spelled(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in SPELLED:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
