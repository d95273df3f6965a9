"""Dense products and the bias, activation and dropout after them."""
