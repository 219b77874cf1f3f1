"""The admission gateway: who is admitted, and the proxy that does it."""
