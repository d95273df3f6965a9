"""What is public is what is documented, and it is really there."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import weft

API = Path(__file__).parent.parent / "docs" / "api.md"


def test_all_is_what_the_page_documents():
    documented = re.findall(r"^### `weft\.(\w+)`$", API.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(documented) == sorted(weft.__all__)


def test_every_public_name_exists():
    for name in weft.__all__:
        assert getattr(weft, name) is not None


def test_every_public_object_has_a_docstring():
    for name in weft.__all__:
        if name != "__version__":
            assert getattr(weft, name).__doc__, name


def test_every_setting_of_a_task_is_documented():
    text = API.read_text(encoding="utf-8")
    for field in weft.Task.__dataclass_fields__:
        assert f"`{field}`" in text, field


def test_run_stays_the_function_whatever_is_imported():
    for module in pkgutil.walk_packages(weft.__path__, "weft."):
        importlib.import_module(module.name)
    assert callable(weft.run)
    assert weft.run.__module__ == "weft.engine.run"
    assert weft.plan.__module__ == "weft.engine.plan"
    assert weft.load is not open
