"""What the policy is shown and what it makes of it; numbers of four H200s, Llama-3-70B in fp8."""

from typing import Any

from comm_pool.layout import Mode, parse_layout
from coordinator.model.observation import Observation, TierObservation
from coordinator.model.observation_log import cost_record, encode
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import LayoutSpace
from coordinator.policy.decide import State, Verdict, decide
from coordinator.protocol.terms import Tier
from tests.simulation.policy_shapes import LLAMA_70B_FP8

MODES = {1: Mode.DP, 2: Mode.TP, 4: Mode.TP}
SPACE = LayoutSpace(4, MODES)
SETTINGS = PolicySettings(decide_every_ms=0, settle_ms=0)


def tier(which: Tier, **seen: Any) -> TierObservation:
    return TierObservation(tier=int(which), **{"prompts": (1_000,), "output_tokens": 150.0, **seen})


def observation(layout: str, *tiers: TierObservation, **more: Any) -> Observation:
    return Observation(60_000, layout, 3, is_switching=False, tiers=tiers, **more)


def verdict(seen: Observation, settings: PolicySettings = SETTINGS) -> Verdict:
    current = parse_layout(seen.layout, 4, (1, 2, 4))
    return decide(seen, current, SPACE, LLAMA_70B_FP8, settings, State())[0]


def log_of(*seen: Observation) -> list[bytes]:
    return [encode(cost_record(0, 4, MODES, LLAMA_70B_FP8, SETTINGS)), *map(encode, seen)]
