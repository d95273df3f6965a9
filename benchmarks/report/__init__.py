"""Tables and sentences with figures, each a function of the files in ``benchmarks/results/``."""
