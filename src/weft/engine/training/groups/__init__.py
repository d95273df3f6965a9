"""The groups of a job: which comes next, where its batches come from, what became of its members."""
