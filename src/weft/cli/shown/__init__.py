"""Tasks and times as people read and write them."""
