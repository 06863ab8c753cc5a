"""The gRPC settings every channel and server of the cluster shares.

gRPC's own defaults are a 4 MiB message, no keepalive and no bound on concurrent calls.
"""

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 16 << 20  # chunks are about 8 MiB; a prompt of 1M token ids is under 5 MiB
MAX_METADATA_BYTES = 16 << 10
MAX_CONCURRENT_CALLS = 4096  # pass to grpc.aio.server(maximum_concurrent_rpcs=...)
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

Options = Sequence[tuple[str, int]]

_BOTH = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options() -> Options:
    """For a client. A channel of its own subchannels never waits out another one's backoff."""
    return (
        *_BOTH,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
    )


def server_options() -> Options:
    """For a server. Clients may ping twice as often as ours do before they are cut off."""
    return (
        *_BOTH,
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a share
    )
