"""One buffer of a device per worker: graphs and weights from its low end, the state of a group from its high end."""
