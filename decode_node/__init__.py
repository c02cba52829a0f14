"""The decode node daemon: pulls KV and generates."""
