"""Planning: pure functions from tasks, statistics and machines to plans. No torch here."""
