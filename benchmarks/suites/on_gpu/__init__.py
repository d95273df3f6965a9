"""Suites that compare ways to train on one GPU."""
