"""Merge the steps of several stacks into shared kernel launches; used only on request."""
