"""What becomes of a step's hidden states: tokens, vectors, or the next rank's inputs."""
