"""Users' steps through Inductor."""
