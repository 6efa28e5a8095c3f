"""One step's batch: laid out on the host, gathered from the rows, committed back to them."""
