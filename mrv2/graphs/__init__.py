"""How a forward is launched: op by op, or (on a GPU, later) as a captured graph."""
