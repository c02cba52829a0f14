"""How every channel of ours is set up."""

import grpc

from splitserve.core.config import MAX_MESSAGE_BYTES

KEEPALIVE_INTERVAL_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished sends no reset: without pings a stream to it would wait for ever.
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Daemons dial each other by address; a proxy for web traffic has no part in that.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port``; connects when first used."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_sync_channel(address: str) -> grpc.Channel:
    """The same for callers without an event loop."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
