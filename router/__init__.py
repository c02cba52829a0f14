"""The router daemon: requests in, deltas out, and which node does what."""
