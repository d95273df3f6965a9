"""Processes that train: workers, the process they are forked from, their memory and their checkpoints."""
