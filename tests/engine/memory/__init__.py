"""The pool of a worker."""
