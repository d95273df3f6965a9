"""Which tasks train together, in which stacks, and what their step computes once."""
