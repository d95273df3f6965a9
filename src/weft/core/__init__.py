"""Plain data and the standard library only: the nouns that every other layer speaks."""
