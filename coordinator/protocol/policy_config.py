"""Configuration of objectives and policy: goals of the tiers, and how soon layouts may change."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TIERS = ("interactive", "standard", "batch")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TierSections(_Frozen):
    """Settings that have a section for each tier, whose defaults differ."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Give the settings that a tier's section leaves out the defaults of that tier."""
        if not isinstance(data, Mapping):
            return data
        return {**data, **_filled(data, {tier: cls.model_fields[tier].default for tier in TIERS})}


def _filled(data: Mapping[Any, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tiers' sections of the data with defaults for what they leave out.

    A default is a model or a mapping; an explicit null stays.
    """
    plain = {
        tier: default.model_dump() if isinstance(default, BaseModel) else default
        for tier, default in defaults.items()
    }
    return {
        tier: {**default, **data[tier]}
        for tier, default in plain.items()
        if isinstance(data.get(tier), Mapping) and isinstance(default, Mapping)
    }


class SloTarget(_Frozen):
    """The objectives of a tier's requests; null is no objective."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Longest time to the first token."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Longest mean time per output token of one stream."""


class SizedSlo(_Frozen):
    """The objectives of large models; what it leaves out is as in `slo`."""

    billions_min: float = Field(gt=0)
    """It applies to models of at least this many billion weights."""
    interactive: SloTarget | None = None
    standard: SloTarget | None = None
    batch: SloTarget | None = None


class SloConfig(TierSections):
    """The objectives of all tiers, for metrics and for the adaptive policy."""

    interactive: SloTarget = SloTarget(ttft_ms=500, tpot_ms=30)
    standard: SloTarget = SloTarget(ttft_ms=2_000, tpot_ms=100)
    batch: SloTarget = SloTarget()
    sizes: tuple[SizedSlo, ...] = ()
    """Other objectives by the model's size, so that cells of several models share one file; of
    those that apply, the one with the largest `billions_min` counts."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sizes(cls, data: Any) -> Any:
        """Give the goals that a size leaves out those of its tier."""
        if not isinstance(data, Mapping) or not isinstance(data.get("sizes"), list | tuple):
            return data
        tiers = {tier: cls.model_fields[tier].default for tier in TIERS}
        tiers |= {tier: data[tier] for tier in TIERS if tier in data} | _filled(data, tiers)
        sizes = [
            {**each, **_filled(each, tiers)} if isinstance(each, Mapping) else each
            for each in data["sizes"]
        ]
        return {**data, "sizes": sizes}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        sizes = [each.billions_min for each in self.sizes]
        if len(set(sizes)) < len(sizes):
            raise ValueError("slo.sizes names a billions_min twice: keep one of the two.")
        return self

    def of_size(self, billions: float) -> "SloConfig":
        """Return the objectives of a model of this many billion weights, without `sizes`."""
        fitting = [each for each in self.sizes if each.billions_min <= billions]
        if not fitting:
            return self.model_copy(update={"sizes": ()})
        largest = max(fitting, key=lambda each: each.billions_min)
        given = {tier: getattr(largest, tier) for tier in TIERS}
        changed = {tier: target for tier, target in given.items() if target is not None}
        return self.model_copy(update={**changed, "sizes": ()})


class TierConfig(_Frozen):
    """How the policy treats a tier."""

    weight: float = Field(default=1.0, gt=0)
    """Worth of a request that meets its objectives, relative to other tiers."""
    width_min: int = Field(default=1, ge=1)
    """Narrowest group for the tier's requests; needs a layout that has one."""


class PolicyConfig(TierSections):
    """Who chooses the layout. With `fixed` only an operator does."""

    name: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` chooses the layout by the load."""
    interactive: TierConfig = TierConfig(weight=2.0)
    standard: TierConfig = TierConfig()
    batch: TierConfig = TierConfig(weight=0.25)
    decide_every_ms: int = Field(default=250, ge=10)
    """How often the policy looks at the load."""
    stay_ms: int = Field(default=3_000, ge=0)
    """Shortest time in a layout; a third of it if a switch would gain more than a quarter."""
    settle_ms: int = Field(default=1_000, ge=0)
    """How long another layout must look a little better before a switch to it."""
    caution_ms: int = Field(default=60_000, ge=0)
    """If goals soon forced a switch from a wide layout that was chosen for speed, the policy does
    not choose such a layout for speed for this long; each repetition doubles it, up to ten times.
    """
    horizon_ms: int = Field(default=8_000, ge=100)
    """How far ahead the policy predicts."""
    switches_per_minute_max: int = Field(default=12, ge=1)
    """Most switches that the policy makes in a minute."""
    pin_ms: int = Field(default=600_000, ge=0)
    """How long the policy keeps the layout of `aileron switch`; 0 lets it decide at once."""
    alternation: Literal["auto", "off"] = "auto"
    """While only batch requests are there, read prompts in one layout and decode in another, where
    predictions say that this is faster than any single layout.
    """
    step_times: str = ""
    """YAML file of step times for predictions, instead of those that ranks measure."""
    observation_log: str = ""
    """File for the policy's observations, for `aileron replay`; empty writes none."""
    observation_log_bytes_max: int = Field(default=64 * 1024**2, ge=4_096)
    """At this size the log moves to `<file>.1` and starts anew."""
