"""Memory and time of a Program on a Machine."""
