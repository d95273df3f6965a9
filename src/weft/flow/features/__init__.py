"""Where feature rows are kept, and which of them are worth device memory."""
