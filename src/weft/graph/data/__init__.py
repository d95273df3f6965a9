"""The Graph and its parts: edges, features, labels, splits, checks, conversion."""
