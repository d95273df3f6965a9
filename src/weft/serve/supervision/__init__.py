"""The parts of the supervisor: planning, scheduling, starting and ending groups, and the workers."""
