"""How a step reaches the device: operation by operation, or as a captured graph."""
