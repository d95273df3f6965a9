"""A cluster of machines: Weft decides what trains together and what it takes, Ray finds a place for it."""
