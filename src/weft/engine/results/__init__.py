"""What a run returns and writes."""
