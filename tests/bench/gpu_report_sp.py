"""The targets of sequence parallelism, beside tp and dp.

Shift Parallelism (section 4) compares latency and throughput of the same modes; the targets here
are tighter where the link is fast, since there is less communication to save.
"""

from typing import Any

from tests.bench.gpu_numbers import Results, find, ratio, sizes
from tests.bench.gpu_report_modes import value
from tests.bench.gpu_verdict import Verdict, at_least, at_most

LONG_PROMPT = "32768"
COMMUNICATION_SAVED_MIN = 0.75
"""Of what tp's all-reduces take, at least so much must be gone from the TTFT of a long prompt."""
THROUGHPUT_OF_DP_MIN = 0.92
TPOT_OF_TP_MAX = 1.03
CHOICE_MAX = 1.03
"""The chosen mode's time over the better one's, at any size."""
SLOW_LINK_TTFT_MIN = 1.5
SLOW_LINK_THROUGHPUT_MIN = 1.4


def communication_ms(results: Results, tokens: int) -> float | None:
    """What the all-reduces of a prompt of so many tokens take in tp, from the measured one."""
    measured = results.get("all_reduce")
    if not measured:
        return None
    steps = tokens / int(measured["tokens"])
    us, count = float(measured["us"]), int(measured["per_step"])
    return us * count * steps / 1e3


def communication_lines(results: Results) -> list[str]:
    """What the all-reduces of a long prompt take, if one was timed."""
    saved = communication_ms(results, int(LONG_PROMPT))
    what = f"All-reduces of {int(LONG_PROMPT):,} tokens in tp{results['ranks']}"
    return [] if saved is None else ["", f"{what}: {saved:.1f} ms."]


def verdicts(results: Results) -> list[Verdict]:
    """The targets of sequence parallelism, of a fast or of a slow link."""
    ranks = results["ranks"]
    shift, tp, dp = f"aileron shift{ranks}", f"static tp{ranks}", f"static dp{ranks}"
    ttft = [value(results, server, "ttft", LONG_PROMPT) for server in (shift, tp)]
    rate = [value(results, server, "saturated", "all") for server in (shift, tp, dp)]
    if find(results, "engine", "disable_custom_all_reduce"):
        return [
            at_least(
                f"slow link: TTFT {LONG_PROMPT} sooner than tp{ranks}'s: at least "
                f"{SLOW_LINK_TTFT_MIN}",
                ratio(ttft[1], ttft[0]),
                SLOW_LINK_TTFT_MIN,
            ),
            at_least(
                f"slow link: saturated over tp{ranks}'s: at least {SLOW_LINK_THROUGHPUT_MIN}",
                ratio(rate[0], rate[1]),
                SLOW_LINK_THROUGHPUT_MIN,
            ),
        ]
    return [
        _long_prompt(results, ttft),
        at_least(
            f"saturated over dp{ranks}'s: at least {THROUGHPUT_OF_DP_MIN}",
            ratio(rate[0], rate[2]),
            THROUGHPUT_OF_DP_MIN,
        ),
        at_least(f"saturated over tp{ranks}'s: at least 1", ratio(rate[0], rate[1]), 1.0),
        at_most(
            f"shift{ranks} TPOT 1 over tp{ranks}'s: at most {TPOT_OF_TP_MAX}",
            ratio(*(value(results, server, "tpot", "1") for server in (shift, tp))),
            TPOT_OF_TP_MAX,
        ),
        _choice(results),
    ]


def _long_prompt(results: Results, ttft: list[Any]) -> Verdict:
    """TTFT of a long prompt against tp's less most of its communication."""
    communication = communication_ms(results, int(LONG_PROMPT))
    limit = None
    if ttft[1] is not None and communication is not None:
        limit = ttft[1] - COMMUNICATION_SAVED_MIN * communication
    target = f"TTFT {LONG_PROMPT}: tp's less {COMMUNICATION_SAVED_MIN:.0%} of its all-reduces"
    if limit is None or ttft[0] is None:
        return Verdict(target, "–", None)
    return Verdict(target, f"{ttft[0]:.1f} ms; limit {limit:.1f} ms", ttft[0] <= limit)


def _choice(results: Results) -> Verdict:
    """The worst ratio of the chosen mode to the better of sp and tp, over all sizes."""
    ranks = results["ranks"]
    worst: tuple[float, str] | None = None
    for kind in ("ttft", "tpot"):
        for size in sizes(results, kind):
            shift, sp, tp = (
                value(results, f"aileron {mode}{ranks}", kind, size)
                for mode in ("shift", "sp", "tp")
            )
            if shift is None or sp is None or tp is None:
                continue
            found = (shift / min(sp, tp), f"{kind} {size}")
            worst = found if worst is None else max(worst, found)
    target = f"shift{ranks} over the better of sp{ranks} and tp{ranks}: at most {CHOICE_MAX}"
    if worst is None:
        return Verdict(target, "–", None)
    return Verdict(target, f"{worst[0]:.3f} at {worst[1]}", worst[0] <= CHOICE_MAX)
