"""The adapter for vLLM's V1 engine, its scheduler in the V1 dialect."""
