"""The search for groups that fit and for the fastest way to train one: what there is to choose from."""
