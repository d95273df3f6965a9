"""Modules as papers have them, one file per topic.

``ALL`` has those of every file here; a file that is added joins them.
"""

from __future__ import annotations

import sys

from torch import nn

from tests.runtime.user_modules.collecting import classes_of
from tests.runtime.user_modules.research.modules.layers import Standard

ALL = [one for one in classes_of(sys.modules[__name__], nn.Module) if one is not Standard]
