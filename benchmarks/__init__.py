"""Benchmarks: each module measures one thing, prints a table and writes a JSON file. See README.md here."""
