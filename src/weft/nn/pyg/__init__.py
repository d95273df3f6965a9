"""Conversion of layers and models from and to PyG."""
