"""Import what is used, when it is used; keep what was made before it is needed."""
