"""Recognise a folder that holds a saved graph, without loading anything of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

FORMAT = "weft-graph"
META = "meta.json"


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a folder that a graph was saved in."""
    try:
        return json.loads((Path(path) / META).read_text()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False
