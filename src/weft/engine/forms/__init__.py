"""Forms derived from graphs (self loops, transposes, first aggregations), remembered between processes."""
