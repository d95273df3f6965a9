"""Every folder of tests is collected: pytest leaves out folders by their names, ``dist`` among them unless told."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent


def test_no_folder_of_tests_is_left_out(pytestconfig):
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for file in HERE.rglob("test_*.py") for part in file.relative_to(HERE).parts[:-1]}
    assert not [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)]
