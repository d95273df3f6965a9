"""Neighbour sampling: seeds, the hops of a batch, and the blocks they give."""
