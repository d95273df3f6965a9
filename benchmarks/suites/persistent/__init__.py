"""One training step of a small graph: launch by launch in a CUDA graph, and as one kernel that stays on the device."""
