"""Users' modules: build them, call them, find out how they may be trained, keep their state."""
