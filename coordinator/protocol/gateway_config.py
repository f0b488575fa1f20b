"""The gateways' part of the configuration: their port, their keys, and how much they take."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coordinator.protocol.secret_text import SecretSetting, read_secret_file
from coordinator.protocol.tls_config import check_pair

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
"""Schemes of a Redis URL that redis-py accepts; unix:// is a socket of this host."""


class GatewayConfig(BaseModel):
    """The serving port."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address of the serving port; any but loopback needs `keys_file` or `insecure_no_auth`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Serving port; 0 is any free one."""
    processes: int = Field(default=1, ge=1, le=64)
    """Gateway processes that share the port; one streams about 9,000 tokens a second. Where neither
    the file nor `--gateways` says so, `aileron up` on GPUs starts two for each."""
    tls_cert_file: str = ""
    """PEM file with the serving port's certificate and its chain; empty serves HTTP."""
    tls_key_file: str = ""
    """PEM file with the private key of `tls_cert_file`; a changed pair is used within seconds."""
    token_listen: str = "tcp://127.0.0.1:0"
    """ZeroMQ address that leaders push tokens to; port 0 is any free one."""
    loop: Literal["asyncio", "uvloop"] = "uvloop"
    """Event loop of a gateway process."""
    keys_file: str = ""
    """YAML file with the hashes of API keys (`aileron key`); empty lets everyone in."""
    insecure_no_auth: bool = False
    """Serve without keys on an address that other machines reach."""
    rate_limit_storage: SecretSetting = "memory://"
    """Store of the counts of requests and tokens per minute and day, and of answers to requests
    with an `Idempotency-Key`; a redis:// URL for several gateways."""
    rate_limit_storage_file: str = ""
    """File that holds the value of `rate_limit_storage`, instead of it."""
    share_prefix_cache: bool = False
    """Let tenants of `keys_file` share cached prompts, whose speed shows what another one sent."""
    objectives: dict[str, Literal["interactive", "standard", "batch"]] = {}
    """Tier of each name in `x-gateway-inference-objective`; empty ignores that header."""
    media_domains: tuple[str, ...] = ()
    """Domains whose media requests may name. It has no effect so far: models of text alone are
    served."""
    requests_max: int = Field(default=4_096, ge=1)
    """Most requests in progress, over all processes. The lowest tiers may use a part of it, and one
    tenant alone eight ninths of its tier's part."""
    body_bytes_max: int = Field(default=8 * 1024**2, ge=1_024, le=32 * 1024**2)
    """Largest body of a request."""
    connections_max: int = Field(default=16_384, ge=1)
    """Most open connections over all processes; the gateway answers one more with 503 at once."""
    connections_per_address_max: int = Field(default=0, ge=0)
    """Most open connections of one client address; 0 is no limit, as behind a load balancer."""
    metrics_listen: str = ""
    """host:port where a gateway process serves its own metrics to everyone, at /metrics; several
    processes take the ports from there. Empty serves none."""

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        host, _, port = self.metrics_listen.rpartition(":")
        if self.metrics_listen and not (host and port.isdecimal() and int(port) <= 65_535):
            raise ValueError("metrics_listen must be host:port, such as 127.0.0.1:8004, or empty.")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_pair("gateway", self.tls_cert_file, self.tls_key_file)
        read_secret_file(self, "gateway", "rate_limit_storage")
        storage = self.rate_limit_storage
        if storage != "memory://" and not storage.startswith(REDIS_SCHEMES):
            raise ValueError("gateway.rate_limit_storage must be memory:// or a redis:// URL.")
        return self

    @property
    def scheme(self) -> str:
        """The scheme of the serving port's URLs."""
        return "https" if self.tls_cert_file else "http"
