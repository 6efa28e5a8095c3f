"""Judging two observations of one step against each other."""
