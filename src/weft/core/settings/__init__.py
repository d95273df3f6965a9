"""Settings of tasks: their rules, search spaces, labels and the files that hold them."""
