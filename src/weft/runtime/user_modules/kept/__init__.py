"""What users' modules keep in Python between calls: walked, compared, written down and given back."""
