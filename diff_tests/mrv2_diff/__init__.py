"""The differential harness: two runners on identical batches, every difference judged and recorded."""
