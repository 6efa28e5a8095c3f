"""The adapter between the runner `mrv2` and vLLM V1: all of vLLM's ways live here, none in `mrv2`.

Importing this package imports no vLLM; its modules do so when they are asked to act.
"""
