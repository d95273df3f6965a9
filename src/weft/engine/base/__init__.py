"""Devices, machines, memory budgets, options and the cache of graphs."""
