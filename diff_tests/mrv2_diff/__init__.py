"""The differential harness: two runners on identical batches, differences judged and recorded."""
