"""Benchmarks: each module measures one thing, prints a table and writes a JSON file. See README.md here."""

import os

os.environ.setdefault("WEFT_PROBE", "off")  # no machine is measured beside what is measured here
