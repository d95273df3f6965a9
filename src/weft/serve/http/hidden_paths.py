"""What users are shown has no folders of the server in it: paths are relative to the folder of graphs, or of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class HiddenPaths:
    """Leaves ``roots`` out of the paths inside them."""

    def __init__(self, *roots: Path | None) -> None:
        places = [place for root in roots if root is not None for place in (root.absolute(), root.resolve())]
        self._roots = [f"{place}/" for place in dict.fromkeys(places) if len(place.parts) > 1]
        self._in_json = [json.dumps(root, ensure_ascii=False)[1:-1] for root in self._roots]

    def text(self, text: str) -> str:
        """``text`` without the roots."""
        for root in self._roots:
            text = text.replace(root, "")
        return text

    def json_text(self, text: str) -> str:
        """A text of JSON without the roots."""
        for root in self._in_json:
            text = text.replace(root, "")
        return text

    def data(self, value: Any) -> Any:
        """Plain data without the roots, also in names."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(name)): self.data(item) for name, item in value.items()}
        return [self.data(item) for item in value] if isinstance(value, list) else value
