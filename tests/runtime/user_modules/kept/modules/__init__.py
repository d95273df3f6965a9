"""Modules that keep something between calls, in every way that a researcher may write: one file per kind of state.

``ALL`` has those of every file here; a file that is added joins them.
"""

from __future__ import annotations

import sys

from tests.runtime.user_modules.collecting import classes_of
from tests.runtime.user_modules.odd_modules import Base

ALL = classes_of(sys.modules[__name__], Base)
