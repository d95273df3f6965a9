"""One training step of a small graph: launch by launch in a CUDA graph, and as one kernel that stays on the device.

Predicted before it was measured, for a GCN on cora (16 phases; launch by launch 0.0975 ms on an H200): 15 waits of 1.5
to 2 microseconds, about 2 microseconds of latency per phase, and waves of the two sums over words (1,709 and 841
programs): 0.06 to 0.07 ms with 512 programs of 4 warps (16 warps per multiprocessor), 0.08 to 0.095 ms with 128. The
goal of 0.05 ms needs fewer phases: an activation before a product, and a product before its activation's gradient,
need only their own rows.
"""
