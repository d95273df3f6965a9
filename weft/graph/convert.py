"""Graphs of other libraries, and back. None of those libraries is imported before it is needed."""

from __future__ import annotations
