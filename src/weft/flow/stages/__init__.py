"""The stages of sampled training as threads with bounded queues between them."""
