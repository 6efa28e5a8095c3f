"""Whole features, one file each."""
