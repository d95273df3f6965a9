"""Graphs by name: embedded, generated in a known shape, downloaded."""
