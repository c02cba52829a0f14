"""What the serve question is made of: a workload, targets, the load, and objectives."""
