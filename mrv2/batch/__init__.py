"""One step's batch: laid out on the host, gathered from the rows on the device, committed back to them."""
