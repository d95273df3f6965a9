"""The device under a step: CUDA graphs, streams, precision, threads, garbage collection, RNG."""
