"""Live progress on a terminal."""
