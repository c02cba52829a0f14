"""The vocabulary everything else speaks. Nothing here knows torch or gRPC."""
