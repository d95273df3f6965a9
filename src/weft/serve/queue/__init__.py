"""The durable queue: tasks, groups and events in one SQLite file."""
