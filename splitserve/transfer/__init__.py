"""Who copies which KV to whom (plan), and one file per way to copy."""
