"""How a sweep becomes tasks: values that vary, their combinations, names of the members."""
