"""Estimate, group and learn: the planner applied to the machine at hand."""
