"""Device operations: a kernel as a value, and a kernel paired with its reference."""
