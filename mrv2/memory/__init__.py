"""Memory that crosses between host and device without either waiting for the other."""
