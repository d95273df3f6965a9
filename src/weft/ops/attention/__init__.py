"""Graph attention (GAT and GATv2), forward and backward."""
