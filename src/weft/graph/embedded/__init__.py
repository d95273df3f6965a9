"""The graph that every installation has: demo.npz, made by ``python -m weft.graph.embedded.make_demo``."""
