"""The variables of vLLM that a gateway's front end may read. Pure.

vLLM reads more than 300 variables, and some of them change its app: VLLM_API_KEY adds another check
of keys, which refuses every request that the edge lets in. A gateway passes on `PASSED` alone.
"""

from collections.abc import Mapping, MutableMapping

VLLM_PREFIX = "VLLM_"
API_KEY = "VLLM_API_KEY"

PASSED = frozenset(
    {
        # Where files lie.
        *("VLLM_ASSETS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
        *("VLLM_MODEL_REDIRECT_PATH", "VLLM_USE_MODELSCOPE"),
        # Without it vLLM loads every plug-in that is installed.
        "VLLM_PLUGINS",
        # Ranks read it as well, and the longest context is the same on both sides.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    }
)
"""Variables of vLLM that keep the user's value."""

DEFAULTS = {
    # The front end computes nothing; torch's threads would take cores from ranks.
    "OMP_NUM_THREADS": "1",
}
"""Variables that are set unless the user has set them."""

FIXED = {
    # vLLM would unpickle data from the token socket.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    # vLLM's log lines go through our logging.
    "VLLM_CONFIGURE_LOGGING": "0",
    # An allowed media server must not redirect the fetch to one that is not allowed.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A gateway needs no device, and vLLM finds no platform in a container without one.
    "VLLM_TARGET_DEVICE": "cpu",
}
"""Variables that replace the user's value."""


def dropped_names(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of vLLM that the user has set in vain, in order."""
    return sorted(
        name
        for name, value in environment.items()
        if name.startswith(VLLM_PREFIX)
        and name not in PASSED
        and value not in ("", FIXED.get(name))
    )


def settle(environment: MutableMapping[str, str]) -> None:
    """Set what vLLM's front end reads, before vLLM is imported."""
    for name in list(environment):
        if name.startswith(VLLM_PREFIX) and name not in PASSED:
            del environment[name]
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    environment.update(FIXED)
