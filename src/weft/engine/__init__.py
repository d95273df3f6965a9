"""Where the brain meets the hands: resolve a task, plan it, run it, save it, and tell."""
