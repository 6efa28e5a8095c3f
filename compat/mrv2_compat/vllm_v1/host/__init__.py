"""What the core needs of its host, over vLLM: model, attention, KV cache, graphs, sizes."""
