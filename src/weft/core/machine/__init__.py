"""Machines: a host, its devices and the links between them, with measured rates."""

from weft.core.machine.machine import Machine

__all__ = ["Machine"]
