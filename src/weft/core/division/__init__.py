"""Who prepares which batch of an epoch: hardware and operators, measured phases, the schedule of two buffers."""

from weft.core.division.division import Division
from weft.core.division.dual_buffer import DualBuffer
from weft.core.division.operators import Operator, Registry, Route, built_in
from weft.core.division.phase_times import PhaseTime, PhaseTimes

__all__ = ["Division", "DualBuffer", "Operator", "PhaseTime", "PhaseTimes", "Registry", "Route", "built_in"]
