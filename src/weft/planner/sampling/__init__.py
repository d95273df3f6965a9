"""Plans of sampled training: how large batches are, where features and edges lie, what moving them costs."""
