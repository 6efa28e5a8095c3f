"""From logits to tokens: the stages that reshape logits, the draw, and the logprobs."""
