"""What is not supported, and what is wrong with a single request."""
