"""What users rely on, through ``weft``, ``weft.nn``, ``weft.ops`` and the shell alone."""
