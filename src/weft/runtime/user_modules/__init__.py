"""Build users' modules and replace the parts of them that stacks need replaced."""
