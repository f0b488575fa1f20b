"""Configuration of what a cell's processes report: their logs, and the usage of tenants."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
LogFormat = Literal["json", "console"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LogConfig(_Frozen):
    """The lines that each process writes on stderr."""

    level: LogLevel = "info"
    """Least level of a line. With debug, libraries report their normal operation as well."""
    format: LogFormat = "json"
    """`json` is one object per line, `console` is text for people."""
    requests: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that gateways log, chosen at random; 0 logs none."""


class UsageConfig(_Frozen):
    """Requests and tokens per tenant, for `GET /admin/usage`."""

    tenants_max: int = Field(default=128, ge=1, le=1_024)
    """Most tenants that a gateway, and a cell, counts by name; further ones count as `other`."""
    days: int = Field(default=31, ge=1, le=366)
    """Days that a coordinator remembers; it keeps each hour of the last two."""
    tenant_metric: bool = False
    """Export the metric `aileron_tenant_tokens_total`, whose label is the tenant."""
