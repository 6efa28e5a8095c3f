"""Traces: what a live engine was sent and what it drew, in one file, and their replay."""
