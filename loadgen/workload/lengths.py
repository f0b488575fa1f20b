"""Lengths of prompts and answers: small length distributions, written as text.

`fixed:128`, `uniform:16-256`, `lognormal:mean=120,sigma=0.6,max=512` and
`mix:0.8*fixed:32+0.2*fixed:512`. Pure: the caller passes the random stream. Every sample is a whole
number of tokens, at least 1 and at most `longest_tokens(...)`.
"""

import math
import random
import re
from dataclasses import dataclass

from loadgen.errors import UsageError

MAX_LENGTH_TOKENS = 1_000_000
MAX_SIGMA = 10.0
EXAMPLES = (
    "fixed:128, uniform:16-256, lognormal:mean=120,sigma=0.6,max=512 or "
    "mix:0.8*fixed:32+0.2*fixed:512"
)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `tokens`."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `low_tokens` to `high_tokens`, both included, equally often."""

    low_tokens: int
    high_tokens: int


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal with the given mean before clipping to [min_tokens, max_tokens]."""

    mean_tokens: float
    sigma: float
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """One of `parts`, chosen with probability proportional to its weight."""

    parts: tuple[tuple[float, "Lengths"], ...]


Lengths = Fixed | Uniform | LogNormal | Mix


def parse_lengths(text: str) -> Lengths:
    """Read one distribution; raises `UsageError`, with examples, for anything else."""
    kind, _, rest = text.strip().partition(":")
    match kind:
        case "fixed":
            return Fixed(_tokens(rest, text))
        case "uniform":
            return _parse_uniform(rest, text)
        case "lognormal":
            return _parse_lognormal(rest, text)
        case "mix":
            return _parse_mix(rest, text)
        case _:
            raise _bad(text, "the kind is unknown")


def sample_tokens(lengths: Lengths, rng: random.Random) -> int:
    """Draw one length, in tokens."""
    match lengths:
        case Fixed(tokens):
            return tokens
        case Uniform(low, high):
            return rng.randint(low, high)
        case LogNormal(mean, sigma, low, high):
            # The mean of a log-normal is exp(mu + sigma^2 / 2).
            drawn = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
            return min(max(round(min(drawn, high)), low), high)
        case Mix(parts):
            chosen = rng.choices([part for _, part in parts], [weight for weight, _ in parts])[0]
            return sample_tokens(chosen, rng)


def scaled(lengths: Lengths, factor: float) -> Lengths:
    """Return the distribution with every length `factor` times as long, at least 1 token.

    Raises `UsageError` above `MAX_LENGTH_TOKENS`.
    """
    match lengths:
        case Fixed(tokens):
            return Fixed(scaled_tokens(tokens, factor))
        case Uniform(low, high):
            return Uniform(scaled_tokens(low, factor), scaled_tokens(high, factor))
        case LogNormal(mean, sigma, low, high):
            longest = min(max(1, round(high * factor)), MAX_LENGTH_TOKENS)
            return LogNormal(
                min(max(1.0, mean * factor), MAX_LENGTH_TOKENS),
                sigma,
                min(scaled_tokens(low, factor), longest),
                longest,
            )
        case Mix(parts):
            return Mix(tuple((weight, scaled(part, factor)) for weight, part in parts))


def scaled_tokens(tokens: int, factor: float) -> int:
    """Return a length `factor` times as long, at least 1 token; 0 stays 0."""
    product = tokens * factor
    if product > MAX_LENGTH_TOKENS:
        raise UsageError(
            f"--length-scale {factor:g} makes {tokens} tokens longer than the limit of "
            f"{MAX_LENGTH_TOKENS}."
        )
    return max(1, round(product)) if tokens else 0


def longest_tokens(lengths: Lengths) -> int:
    """Return the largest length that `sample_tokens` can return."""
    match lengths:
        case Fixed(tokens):
            return tokens
        case Uniform(_, high):
            return high
        case LogNormal(_, _, _, high):
            return high
        case Mix(parts):
            return max(longest_tokens(part) for _, part in parts)


def _parse_uniform(rest: str, text: str) -> Uniform:
    low_text, dash, high_text = rest.partition("-")
    if not dash:
        raise _bad(text, "a uniform length needs LOW-HIGH")
    low, high = _tokens(low_text, text), _tokens(high_text, text)
    if low > high:
        raise _bad(text, f"{low} is above {high}")
    return Uniform(low, high)


def _parse_lognormal(rest: str, text: str) -> LogNormal:
    fields = dict(re.findall(r"(\w+)=([^,=]+)", rest))
    if ",".join(f"{key}={value}" for key, value in fields.items()) != rest:
        raise _bad(text, "a log-normal length is written key=value,key=value")
    if not {"mean", "sigma"} <= set(fields) <= {"mean", "sigma", "min", "max"}:
        raise _bad(text, "a log-normal length takes mean, sigma, min and max, the first two always")
    low = _tokens(fields.get("min", "1"), text)
    high = _tokens(fields.get("max", str(MAX_LENGTH_TOKENS)), text)
    mean, sigma = _number(fields["mean"], text), _number(fields["sigma"], text)
    if mean < 1 or mean > MAX_LENGTH_TOKENS or sigma > MAX_SIGMA or low > high:
        raise _bad(
            text,
            f"mean must be 1 to {MAX_LENGTH_TOKENS}, sigma at most {MAX_SIGMA:g}, "
            "and min not above max",
        )
    return LogNormal(mean, sigma, low, high)


def _parse_mix(rest: str, text: str) -> Mix:
    parts = []
    for part in rest.split("+"):
        weight_text, star, lengths_text = part.partition("*")
        if not star or lengths_text.startswith("mix"):
            raise _bad(text, "a mix is WEIGHT*LENGTH+WEIGHT*LENGTH, with no mix inside")
        weight = _number(weight_text, text)
        if weight == 0:
            raise _bad(text, "weights must be above 0")
        parts.append((weight, parse_lengths(lengths_text)))
    return Mix(tuple(parts))


def _tokens(digits: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_LENGTH_TOKENS:
        raise _bad(text, f"'{digits}' is not a number of tokens from 1 to {MAX_LENGTH_TOKENS}")
    return int(digits)


def _number(digits: str, text: str) -> float:
    try:
        number = float(digits)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise _bad(text, f"'{digits}' is not a number of 0 or more")
    return number


def _bad(text: str, reason: str) -> UsageError:
    return UsageError(f"Length '{text}' cannot be read: {reason}; write for example {EXAMPLES}.")
