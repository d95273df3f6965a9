"""The queue over HTTP: requests, limits, tokens, metrics and the dashboard."""
