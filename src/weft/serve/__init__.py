"""Serving a queue: the durable queue that worker processes share."""
