"""vLLM as its users start it: an engine or a server in a process of its own."""
