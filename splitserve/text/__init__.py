"""Text to tokens and back; only the router and clients need it."""
