"""gRPC without generated code: bidirectional streams whose bodies are msgpack structs.

`messages/` is the schema. msgspec validates types while it decodes, so a malformed or foreign
message is an error at the edge. Servers and clients take their codecs from here.
"""

import msgspec

from coordinator.protocol.messages.gateway import GatewayDown, GatewayUp
from coordinator.protocol.messages.launcher import RanksEnded, RenewRanks
from coordinator.protocol.messages.rank import RankDown, RankUp, TokenBatch
from coordinator.protocol.metrics_wire import Measures

SERVICE = "aileron.Cell"
RANK_METHOD = "RankSession"
GATEWAY_METHOD = "GatewaySession"
LAUNCHER_METHOD = "LauncherSession"
RANK_PATH = f"/{SERVICE}/{RANK_METHOD}"
GATEWAY_PATH = f"/{SERVICE}/{GATEWAY_METHOD}"
LAUNCHER_PATH = f"/{SERVICE}/{LAUNCHER_METHOD}"

TOKEN_METADATA_KEY = "x-aileron-token"
"""Metadata key of the shared secret that every peer of a cell must present."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest single message; a task's payload may hold a long prompt or multimodal features."""

KEEPALIVE_MS = 5_000
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # By default a server treats pings of a quiet session as abuse and ends the session.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 5),
    ("grpc.http2.max_ping_strikes", 0),
)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_rank_up = msgspec.msgpack.Decoder(RankUp).decode
decode_rank_down = msgspec.msgpack.Decoder(RankDown).decode
decode_gateway_up = msgspec.msgpack.Decoder(GatewayUp | Measures).decode
decode_gateway_down = msgspec.msgpack.Decoder(GatewayDown).decode
decode_launcher_up = msgspec.msgpack.Decoder(RanksEnded).decode
decode_launcher_down = msgspec.msgpack.Decoder(RenewRanks).decode
decode_token_batch = msgspec.msgpack.Decoder(TokenBatch).decode
decode_frames = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode
"""A task's payload: the frames of vLLM's encoded `EngineCoreRequest`."""
