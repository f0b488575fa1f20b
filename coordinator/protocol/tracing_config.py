"""Configuration of traces: where spans go, and how many."""

from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coordinator.protocol.secret_text import SecretSetting


class TracingConfig(BaseModel):
    """OpenTelemetry traces of requests and switches; none without an endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: SecretSetting = ""
    """Collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; empty traces nothing.
    `${NAME}` stands for an environment variable."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests to trace; a request's own `traceparent` decides for that request."""
    queue_spans_max: int = Field(default=4_096, ge=16)
    """Most spans of a process that wait for the collector; more are dropped."""

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        parts = urlsplit(self.endpoint)
        if self.endpoint and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(
                "endpoint must be the http:// or https:// URL of a collector, such as "
                "http://127.0.0.1:4318; leave it empty to trace nothing."
            )
        return self

    @property
    def traces_url(self) -> str:
        """Where spans are sent: OTLP's own path, unless the endpoint has one."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return self.endpoint if has_path else self.endpoint.rstrip("/") + "/v1/traces"
