"""Whether a cell can serve its model, decided in milliseconds from the model's files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from coordinator.protocol.config import CellConfig, Config, ConfigError
from coordinator.protocol.engine_options import (
    NOT_OFFERED,
    GivenOption,
    OptionError,
    is_on,
    last_value,
    read_options,
    size_value,
)
from coordinator.protocol.held_weights import FOUR_BYTES, element_bytes, held_bytes
from coordinator.protocol.kv_check import KV_BYTES, kv_refusal
from coordinator.protocol.model_files import (
    Fetch,
    ModelFiles,
    ModelFilesError,
    find_in_hub,
    find_model,
    missing_files,
    weight_bytes,
)
from coordinator.protocol.model_length import WINDOWLESS, length_refusal
from coordinator.protocol.model_size import model_size
from coordinator.protocol.model_support import Holding, is_multimodal, overrides_of, refusals
from coordinator.protocol.option_values import check_values

GIB = 2**30
UTILIZATION = 0.92
"""vLLM's default share of a GPU's memory; a test compares it."""
SHARE, OFFLOAD = "--gpu-memory-utilization", "--cpu-offload-gb"
LENGTH = "--max-model-len"
TWO_BYTES = ("bfloat16", "float16", "half")


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that weights may take."""

    bytes: int
    """Of one device, or of the whole machine on CPU."""
    device: str
    free_bytes: int | None = None
    """What is free of it now, if that is known."""


def check_model(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    *,
    weights: bool = True,
    memory: Memory | None = None,
    fetch: Fetch | None = None,
) -> ModelFiles:
    """Return the model's files; raises `ConfigError` with the first reason not to serve it.

    A gateway needs no `weights`. The check skips files that vLLM has yet to download.
    """
    options = checked_options(config)
    try:
        files = _find(config, options, environment, fetch)
        # First what no file mends: nobody should fetch the weights of a model that is not served.
        sentences = [*_reasons(config, files, options)]
        sentences += _missing(files, options, weights=weights)
        size = _loaded_bytes(files, options) if memory is not None else 0
    except ModelFilesError as error:
        raise ConfigError(str(error)) from error
    if not sentences and files.config is not None:
        if is_multimodal(files.config) and find_spec("torchvision") is None:
            sentences.append(f"{config.model.path}: {NEEDS_TORCHVISION}")
        sentences += _too_many_whole(config, files.config)
        sentences += _too_long(files.config, options, environment)
    if not sentences and memory is not None:
        sentences = [*_too_large(config, files, size, options, memory)]
    if sentences:
        raise ConfigError(sentences[0])
    return files


def checked_options(config: Config) -> list[GivenOption]:
    """Return vLLM's options; raises `ConfigError` for one that vLLM or this server refuses."""
    try:
        options, others = read_options(config.model.engine_args)
        for option in options:
            if option.name in NOT_OFFERED:
                raise OptionError(f"{option.name} is not offered: {NOT_OFFERED[option.name]}.")
        if others:
            raise OptionError(f"{others[0]!r} is no option: vLLM's options begin with --.")
        check_ranges(options)
        check_values(options)
    except OptionError as error:
        raise ConfigError(f"model.engine_args: {error}") from error
    return options


NEEDS_TORCHVISION = (
    "vLLM's classes of multimodal models import torchvision, also for text alone: install the "
    "build of torchvision that belongs to this torch."
)


def require_reachable(
    config: Config,
    files: ModelFiles,
    environment: Mapping[str, str] = os.environ,
    fetch: Fetch | None = None,
) -> bool:
    """Return whether all is in the cache, and Hugging Face does not answer.

    `files` are the model's. Raises `ConfigError` if the model or its tokenizer cannot be had.
    """
    if files.is_unreachable:
        raise ConfigError(files.unreachable)
    options, _ = read_options(config.model.engine_args)
    try:
        cached = [files]
        for name, revision in (
            ("--tokenizer", "--tokenizer-revision"),
            ("--hf-config-path", "--revision"),
        ):
            if (path := last_value(options, name)) is not None:
                found = find_model(path, environment, fetch, last_value(options, revision) or "")
                if found.is_unreachable:
                    raise ConfigError(f"{name}: {found.unreachable}")
                cached.append(found)
        cached = [each for each in cached if each.folder is not None and not each.is_complete]
        if not cached or not find_in_hub(cached[0].name, environment, fetch).is_unreachable:
            return False
        missing = _missing(replace(files, is_complete=True), options, weights=True)
    except ModelFilesError as error:
        raise ConfigError(str(error)) from error
    if missing:
        raise ConfigError(f"{missing[0]} Hugging Face does not answer now.")
    return True


def check_ranges(options: Sequence[GivenOption]) -> None:
    """Refuse numbers of the memory check that vLLM refuses as well."""
    share, offload = last_value(options, SHARE), last_value(options, OFFLOAD)
    if share is not None and not 0 < float(share) <= 1:
        raise OptionError(f"{SHARE} {share}: use a number above 0, and 1 at most.")
    if offload is not None and float(offload) < 0:
        raise OptionError(f"{OFFLOAD} {offload}: use 0 or more.")
    if (kv_bytes := size_value(options, KV_BYTES)) < 0:
        raise OptionError(f"{KV_BYTES} {kv_bytes}: use 0 or more.")
    length = last_value(options, LENGTH)
    if length is not None and (size_value(options, LENGTH) < 0 or length.strip() == "0"):
        raise OptionError(f"{LENGTH} {length}: use 1 or more, or leave it out.")


def _find(
    config: Config,
    options: Sequence[GivenOption],
    environment: Mapping[str, str],
    fetch: Fetch | None,
) -> ModelFiles:
    revision = last_value(options, "--revision") or ""
    files = find_model(config.model.path, environment, fetch, revision)
    if (path := last_value(options, "--hf-config-path")) is not None:
        files = replace(files, config=find_model(path, environment, fetch, revision).config)
    if last_value(options, "--config-format") in (None, "auto", "hf"):
        return files
    return ModelFiles(files.name, None, None, is_complete=False)


def _reasons(config: Config, files: ModelFiles, options: Sequence[GivenOption]) -> Iterator[str]:
    """Yield what config.json alone shows that ranks cannot serve."""
    if files.config is None:
        return
    cell = config.cell
    holding = Holding(max(cell.widths), cell.weight_parts, cell.borrow)
    for reason in refusals(files.config, options, cell.device, cell.widths, holding):
        yield f"{config.model.path}: {reason}"


def _missing(files: ModelFiles, options: Sequence[GivenOption], *, weights: bool) -> list[str]:
    if files.folder is not None and (files.folder / "params.json").exists():
        return []  # vLLM reads Mistral's own form too.
    loads_files = load_format(options) in ("auto", "safetensors")
    needs_tokenizer = not (
        last_value(options, "--tokenizer") or is_on(options, "--skip-tokenizer-init")
    )
    return list(
        missing_files(
            files,
            load_format(options),
            weights=weights and loads_files,
            tokenizer=needs_tokenizer,
        )
    )


def load_format(options: Sequence[GivenOption]) -> str:
    """Return the format in which vLLM looks for the weights."""
    return last_value(options, "--load-format") or "auto"


def _too_long(
    model: Mapping[str, Any], options: Sequence[GivenOption], environment: Mapping[str, str]
) -> list[str]:
    """Return a sentence if requests may not be as long as the options say."""
    asked = size_value(options, LENGTH)
    config, is_windowless = {**model, **overrides_of(options)}, is_on(options, WINDOWLESS)
    sentence = length_refusal(config, asked, environment, is_windowless=is_windowless)
    return [] if sentence is None else [sentence]


def _too_many_whole(config: Config, model: Mapping[str, Any]) -> list[str]:
    """Return a sentence if nothing is left to borrow."""
    layers = model.get("num_hidden_layers")
    counts = whole_counts(config.cell)
    if not isinstance(layers, int) or not counts:
        return []
    if max(counts) > layers:
        return [
            f"cell.whole_layers names {max(counts)}, but the model has {layers} layers: use at "
            "most that many."
        ]
    if min(counts) < layers:
        return []
    return [
        f"cell.whole_layers is {layers}, and the model has {layers} layers, so ranks would hold "
        "all of them: use a smaller number, or leave out --weight-parts."
    ]


def _too_large(
    config: Config,
    files: ModelFiles,
    size: int,
    options: Sequence[GivenOption],
    memory: Memory,
) -> list[str]:
    """Return a sentence if weights of `size` bytes, or KV beside them, surely exceed the memory."""
    if float(last_value(options, OFFLOAD) or 0):
        return []
    cell = config.cell
    held = [_held_bytes(cell, files, size, whole) for whole in whole_counts(cell) or (0,)]
    if cell.device == "cpu":
        needed = sum(held) * cell.ranks // len(held)
        room, who = memory.bytes, f"{cell.ranks} ranks"
    else:
        utilization = float(last_value(options, SHARE) or UTILIZATION)
        needed = max(held) * cell.ranks_per_device
        room, who = int(memory.bytes * utilization), "a device"
    if needed <= room:
        if memory.free_bytes is not None:
            room = min(room, memory.free_bytes)
        elif cell.device == "cuda":
            room = memory.bytes  # The share of a device holds only for KV without a size.
        sentence = kv_refusal(cell, options, room, needed, memory.device)
        return [] if sentence is None else [sentence]
    return [
        f"{config.model.path}: its weights take {needed / GIB:.1f} GiB in {who}, but "
        f"{memory.device} has room for {room / GIB:.1f} GiB: {_remedy(config, files, size, room)}"
    ]


def whole_counts(cell: CellConfig) -> tuple[int, ...]:
    """Return the numbers of whole layers, one for all ranks or one for each; empty for `auto`."""
    whole = cell.whole_layers
    if whole == "auto":
        return ()
    return whole if isinstance(whole, tuple) else (whole,)


def _held_bytes(cell: CellConfig, files: ModelFiles, size: int, whole_layers: int) -> int:
    """Return the least bytes of a model of `size` bytes that a rank with whole layers holds.

    Without the memory that loans go into. Where the config does not say how large layers are, all
    of the model counts as divided.
    """
    config = files.config or {}
    model = model_size(config)
    if model is None:
        return size // cell.weight_parts
    parts = cell.weight_parts, cell.borrow, whole_layers
    held = held_bytes(model, element_bytes(config), *parts)
    stored = held_bytes(model, element_bytes(config, in_files=True))
    return int(size * (held.weights + held.whole_layers) / stored.total)


def _remedy(config: Config, files: ModelFiles, size: int, room: int) -> str:
    cell = config.cell
    if cell.device == "cpu" and size <= room:
        return f"use --ranks {max(1, room // size)}, or a smaller model."
    others = [cell]
    if cell.device == "cuda":
        borrow = dict.fromkeys((cell.borrow, "all"))
        others = [
            cell.model_copy(update={"weight_parts": parts, "borrow": each, "whole_layers": 0})
            for parts in sorted(cell.widths)
            if parts > 1 and parts >= cell.weight_parts
            for each in borrow
        ]
    fits = (each for each in others if _held_bytes(each, files, size, 0) <= room)
    found = next(fits, None)
    if found is None:
        return "use a smaller model or larger devices."
    parts = found.weight_parts
    if parts == cell.weight_parts and found.borrow == cell.borrow:
        return "use fewer --whole-layers."
    also = "" if found.borrow == cell.borrow else f" --borrow {found.borrow}"
    of = "of the feed-forward layers" if found.borrow == "ffn" else "of all layers"
    return f"use --weight-parts {parts}{also}, so that each rank holds one of {parts} parts {of}."


def _loaded_bytes(files: ModelFiles, options: Sequence[GivenOption]) -> int:
    """Return the least bytes that the weights take once they are loaded."""
    size, config = weight_bytes(files, load_format(options)), files.config or {}
    stored = str(config.get("dtype") or config.get("torch_dtype") or "")
    wanted = last_value(options, "--dtype") or "auto"
    if last_value(options, "--quantization"):
        return size // 2
    if stored in TWO_BYTES and wanted in FOUR_BYTES:
        return size * 2
    if stored == "float32" and wanted not in FOUR_BYTES:
        return size // 2
    return size
