"""Where the batches of a step come from: the whole graph, sampled neighbourhoods, a shard, or a dry run."""
