"""Planner and runtime applied to the machine at hand: plan, run, save and report."""
