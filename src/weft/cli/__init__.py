"""The shell: ``weft run``, ``weft data`` and what comes later."""
