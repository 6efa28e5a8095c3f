"""A toy user of every seam of the runner: the examples of how a feature is added.

Each is as short as it can be and still shows in the tokens of HashLM where the runner fails it.
"""
