"""The search for the fastest way to train a group: what there is to choose from."""
