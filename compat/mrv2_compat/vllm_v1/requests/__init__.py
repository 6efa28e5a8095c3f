"""What a request may ask, what is not supported, and what is wrong with a single request."""
