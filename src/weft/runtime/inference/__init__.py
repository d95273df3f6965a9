"""Call trained models outside of a training: the same treatment of features, on any graph."""
