"""Between vLLM's scheduler and the core: a step in, its output back."""
