"""Neighbour sampling of one hop, relabelling of what was sampled, and gathering of feature rows."""
