"""What is said of vLLM without importing it, against vLLM 0.32.0 itself."""

import contextlib
import io

import pytest

from coordinator.protocol.engine_options import TABLE, OptionError, read_options
from coordinator.protocol.model_check import UTILIZATION
from coordinator.protocol.model_support import KV_TYPES

vllm = pytest.importorskip("vllm")

LINES = (
    ["--max-model-len", "32k"],
    ["--max_num_seqs=5", "-tp", "2"],
    ["-O3"],
    ["-O", "2"],
    ["--served-model-name", "a", "b", "--enforce-eager"],
    ["--compilation-config.mode", "0"],
    ["-cc.mode=3"],
    ["--seed", "-1"],
    ["--gpu-memory-util", ".5"],
    ["--no-enable-prefix-caching"],
    ["--max-modle-len", "4"],
    ["--max-num-s", "4"],
    ["--max-num-seqs", "many"],
    ["--kv-cache-dtype", "fp9"],
    ["--enforce-eager=1"],
    ["--dtype"],
    ["--gpu-memory-utilization", "90%"],
    ["--gpu-memory-utilization", "None"],
    ["--gpu-memory-utilization.x", "1"],
    ["--api-server-count", "None"],
    ["--num-gpu-blocks-override", "None"],
    ["--kv-cache-memory-bytes="],
    ["--quantization", "None"],
    ["--max-num-seqs", "1__0"],
)


def test_the_table_is_that_of_vllm_s_parser() -> None:
    from tests.harness.vllm.option_table import text

    assert TABLE.read_text() == text(), "python -m tests.harness.vllm.option_table writes it"


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_lines_are_refused_where_vllm_refuses_them(words: list[str]) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    theirs = ours = True
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        except SystemExit:
            theirs = False
    try:
        read_options(words)
    except OptionError:
        ours = False
    assert ours == theirs


def test_defaults_and_types_are_vllm_s() -> None:
    from typing import get_args

    from vllm.config import CacheConfig
    from vllm.config.cache import CacheDType

    assert CacheConfig.gpu_memory_utilization == UTILIZATION
    assert set(KV_TYPES) < set(get_args(CacheDType))
