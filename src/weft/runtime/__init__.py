"""The hands: a plan alive on a device. The functional step, its state, its replay and its checkpoints."""
