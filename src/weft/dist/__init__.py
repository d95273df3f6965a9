"""One graph over several ranks: partition arrays, memory that peers read, a sharded adjacency, and the ranks."""
