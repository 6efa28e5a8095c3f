"""Two runners in one vLLM engine, on the same batches.

With `drivers`, the only place in the harness that imports vLLM.
"""
