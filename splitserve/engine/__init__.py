"""What both kinds of node do: batches, workers, the step loop, standing up and draining."""
