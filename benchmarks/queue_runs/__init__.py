"""Queues of tasks through the server or PyG, measured: the parts of ``benchmarks.suites.queues``."""
