"""gRPC set-up shared by all daemons, and the bridge between proto and vocabulary."""
