"""Import what is used, when it is used."""
