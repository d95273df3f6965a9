"""The one place that says which Weft this is."""

__version__ = "0.1.0"
