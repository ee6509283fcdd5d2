"""Options of gRPC channels and servers, and the names of the service."""

from fedpdmc.federation.codecs import MOST_BYTES

SERVICE, JOIN, CHECK = "fedpdmc.Federation", "Join", "Check"
# Seconds allowed for a TLS handshake.
HANDSHAKE = 10.0
CHANNEL = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    # A compressed message is unpacked before its size is checked, so compression is not accepted.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Every connection makes its own handshake.
    ("grpc.use_local_subchannel_pool", 1),
    # Pings detect a peer that has vanished.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
SERVER = [
    *CHANNEL,
    ("grpc.so_reuseport", 0),
    # A site that waits for a slow round only sends pings. This is not abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 8192),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
    # A site has one stream, and a second one while it reconnects.
    ("grpc.max_concurrent_streams", 4),
]
