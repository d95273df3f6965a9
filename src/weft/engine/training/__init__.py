"""Train a run: job, session, folders, events."""
