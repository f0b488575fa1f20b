"""The targets of pipeline groups, beside tp, dp and vLLM's own pipeline.

Seesaw (section 3.1) compares throughput of pp and tp; the targets name the same loads.
"""

from collections.abc import Iterator

from tests.bench.gpu_numbers import Results, find, loads, ratio
from tests.bench.gpu_report_modes import value
from tests.bench.gpu_verdict import Verdict, at_least, at_most

LONG_PROMPT = "32768"
PREFILL_OVER_TP_MIN = 1.7
PREFILL_OVER_DP_MIN = 0.93
LONG_PROMPT_MS_MAX = {"llama-3-70b-fp8": 3600.0}
SATURATED_OVER_TP_MIN = 1.6
SATURATED_OVER_PP_MIN = 1.05
SATURATED = "x3000+256"
PREFILL = "+1"
SWITCH_P50_MS_MAX = 90.0
SWITCH_P99_MS_MAX = 150.0


def verdicts(results: Results) -> list[Verdict]:
    """The targets of pipeline groups, of a fast or of a slow link."""
    has_slow_link = find(results, "engine", "disable_custom_all_reduce")
    return list(_throughput(results) if has_slow_link else _switches(results))


def _load(results: Results, ending: str) -> str:
    """Return the name of the first load that ends so, or the ending."""
    return next((size for size in loads(results) if size.endswith(ending)), ending)


def _throughput(results: Results) -> Iterator[Verdict]:
    ranks = results["ranks"]
    pp = f"pp{ranks}"
    for side, mode, ending, least, what in (
        ("aileron", "tp", PREFILL, PREFILL_OVER_TP_MIN, "prompts"),
        ("aileron", "dp", PREFILL, PREFILL_OVER_DP_MIN, "prompts"),
        ("static", "tp", SATURATED, SATURATED_OVER_TP_MIN, "3,000+256 tokens"),
        ("static", "pp", SATURATED, SATURATED_OVER_PP_MIN, "3,000+256 tokens"),
    ):
        size = _load(results, ending)
        servers = f"aileron {pp}", f"{side} {mode}{ranks}"
        by = ratio(*(value(results, server, "saturated", size) for server in servers))
        target = f"slow link, {what}: {pp} at least {least} x {side} {mode}{ranks}"
        yield at_least(target, by, least)
    if (limit_ms := LONG_PROMPT_MS_MAX.get(results["shape"])) is not None:
        ttft_ms = value(results, f"aileron {pp}", "ttft", LONG_PROMPT)
        target = f"slow link: TTFT of {LONG_PROMPT} tokens at most {limit_ms:,.0f} ms"
        yield at_most(target, ttft_ms, limit_ms, ".0f")


def _switches(results: Results) -> Iterator[Verdict]:
    run = find(results, "aileron", "switches", "reshard") or {}
    gap = run.get("client_stall_worst_ms") or {}
    for part, limit_ms in (("p50", SWITCH_P50_MS_MAX), ("p99", SWITCH_P99_MS_MAX)):
        target = f"switch from or to pp{results['ranks']}, longest gap, {part}"
        yield at_most(f"{target}: at most {limit_ms:.0f} ms", gap.get(part), limit_ms, ".1f")
