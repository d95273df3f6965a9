"""Decide which queued tasks share a device: policies, admission, and a simulator to compare them. No torch."""
