"""The commands of ``weft``, one module per command."""
