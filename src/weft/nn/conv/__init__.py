"""One layer per file."""
