"""One training step of a stack: state, inputs, forward, loss, update, evaluation."""
