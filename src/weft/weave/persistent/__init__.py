"""A training step as one kernel that stays on the device: its programs wait for each other between phases."""
