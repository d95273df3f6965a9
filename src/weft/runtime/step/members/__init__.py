"""The members of a stack: their models, what trying them showed, and their copies."""
