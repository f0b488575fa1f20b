"""`aileron plan`: what a model needs on some GPUs, and what fits, from its config.json alone."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from comm_pool.mixed import Mixed, MixedError, read_mixed
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.hardware import gpu_memory_bytes, gpu_names, host_memory_bytes
from coordinator.cli.tables import format_table
from coordinator.protocol.engine_options import (
    GivenOption,
    OptionError,
    is_on,
    read_options,
    size_value,
)
from coordinator.protocol.kv_check import KV_BYTES, advised_bytes
from coordinator.protocol.model_check import check_ranges
from coordinator.protocol.model_files import ModelFiles, ModelFilesError, find_model
from coordinator.protocol.model_length import WINDOWLESS, length_refusal
from coordinator.protocol.model_support import Holding, overrides_of, refusals
from coordinator.protocol.option_values import check_values
from coordinator.sizing.cell_plan import (
    CellPlan,
    Division,
    LayoutPlan,
    divisions,
    fewest_gpus,
    longest_length,
    plan_cell,
    with_lone_ranks,
)
from coordinator.sizing.model_facts import Device, ModelFacts, device_of, facts_of
from kvadaptor.host.layout import HostMemoryError, layout_of

GIB = 2**30
HOST_GIB_MAX = 65_536
RANKS_MAX = 64
"""The most GPUs that `aileron plan` looks at."""
SHORTEST_LENGTH = 1_024
"""No shorter requests are advised, in tokens."""
OPTIONS = (
    *("max_model_len", "gpu_memory_utilization", "dtype", "quantization", "kv_cache_dtype"),
    *("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "block_size"),
)
"""Options of vLLM that change sizes, as `aileron plan` has them too."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model on some devices: one plan for each way to hold its weights."""

    name: str
    facts: ModelFacts
    device: Device
    ranks: int
    cells: tuple[CellPlan, ...]
    host_tokens: int | None = None
    """Tokens of KV in host memory; None if no host memory is asked for."""


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan; the status is 1 if the model fits in no layout."""
    found = plan_model(options)
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0 if any(cell.fits for cell in found.cells) else 1


def plan_model(options: argparse.Namespace) -> ModelPlan:
    """Return the plan that these options ask for; raises `CliError`."""
    given = _engine_options(options)
    kind = _kind(options)
    ranks = _ranks(options)
    memory = _memory_bytes(options, kind)
    try:
        files = find_model(options.model, os.environ, revision=options.revision or "")
    except ModelFilesError as error:
        raise CliError(str(error), USAGE_STATUS) from error
    if (config := files.config) is None:
        raise CliError(files.unreachable if files.is_unreachable else _without_config(files))
    config = {**config, **overrides_of(given)}
    asked = size_value(given, "--max-model-len")
    is_windowless = is_on(given, WINDOWLESS)
    sentence = length_refusal(config, asked, os.environ, is_windowless=is_windowless)
    if sentence is not None:
        raise CliError(f"{options.model}: {sentence}", USAGE_STATUS)
    facts = facts_of(config, given, kind, memory)
    if facts is None:
        for reason in refusals(config, given, kind):
            raise CliError(f"{options.model}: {reason}")
        raise CliError(
            f"the config.json of {options.model} does not say how large the model is: "
            "`aileron plan` needs hidden_size, num_hidden_layers, num_attention_heads and "
            "vocab_size.",
        )
    device = device_of(given, kind, memory, ranks)

    def refusal_of(division: Division) -> str:
        holding = Holding(division.widths[-1], division.parts, division.borrow)
        return next(refusals(config, given, kind, division.widths, holding), "")

    cells = tuple(
        plan_cell(facts, device, division, refusal_of(division))
        for division in with_lone_ranks(_divisions(options, facts, ranks), refusal_of)
    )
    found = ModelPlan(
        options.model, facts, device, ranks, cells, _host_tokens(options.host_kv, facts, ranks)
    )
    return replace(found, cells=tuple(with_advice(found, refusal_of)))


def _ranks(options: argparse.Namespace) -> int:
    named = [("--gpus", options.gpus), ("--ranks", options.ranks)]
    counts = [(name, count) for name, count in named if count is not None]
    for name, count in counts:
        if not 1 <= count <= RANKS_MAX:
            raise CliError(f"{name} {count}: use 1 to {RANKS_MAX}.", USAGE_STATUS)
    if len({count for _, count in counts}) > 1:
        raise CliError("--gpus and --ranks differ: give one of them.", USAGE_STATUS)
    return counts[0][1] if counts else max(1, len(gpu_names()))


def _without_config(files: ModelFiles) -> str:
    place = files.folder or "Hugging Face"
    return (
        f"`aileron plan` needs a config.json, and {place} gives none for {files.name}: name the "
        "folder of a model in Hugging Face's form."
    )


def _host_tokens(gib: float | None, facts: ModelFacts, ranks: int) -> int | None:
    """Return the tokens of KV that this much host memory holds; raises `CliError` if it is none."""
    if gib is None:
        return None
    if not 0 <= gib <= HOST_GIB_MAX:
        raise CliError(f"--host-kv {gib:g}: use at most {HOST_GIB_MAX} (GiB).", USAGE_STATUS)
    try:
        layout = layout_of(int(gib * GIB), ranks, facts.geometry.page_bytes)
    except HostMemoryError as error:
        raise CliError(f"--host-kv {gib:g}: {error}", USAGE_STATUS) from error
    return layout.pages * facts.block_tokens


def with_advice(plan: ModelPlan, refusal_of: Callable[[Division], str]) -> Iterator[CellPlan]:
    """Yield the cells, with what to change for those that do not start."""
    fitting = next((cell for cell in plan.cells if cell.fits), None)
    for cell in plan.cells:
        yield cell if cell.fits else replace(cell, advice=_advice(plan, cell, fitting, refusal_of))


def _advice(
    plan: ModelPlan,
    cell: CellPlan,
    fitting: CellPlan | None,
    refusal_of: Callable[[Division], str],
) -> str:
    is_refused = bool(refusal_of(cell.division))
    length = 0 if is_refused else longest_length(plan.facts, cell)
    found = []
    if cell.asks_too_much_kv:
        advised = advised_bytes(cell.room_bytes, cell.held.total + cell.other.total, 1)
        if advised:
            found.append(f"use at most {KV_BYTES} {advised}")
        found.append(f"leave out {KV_BYTES}")
    if length >= SHORTEST_LENGTH and length < plan.facts.length:
        found.append(f"use --max-model-len {length // 256 * 256}")
    if fitting is not None:
        other = fitting.division
        whole = "use --widths 1" if other.alone else "let ranks hold all weights"
        found.append(f"use {other.name}" if other.parts > 1 else whole)
    if not found and plan.device.kind == "cuda":
        more = fewest_gpus(plan.facts, plan.device, RANKS_MAX, refusal_of)
        if more is not None and more.division.ranks > plan.ranks:
            how = "" if more.division.parts == 1 else f" with {more.division.name}"
            found.append(f"use {more.division.ranks} such GPUs{how}")
    if is_refused and not found:
        return ""  # The reason has the remedy: no size or device changes it.
    if not found:
        found.append("use a smaller model, a quantized one, or larger devices")
    return f"{', or '.join(found)}."


def _kind(options: argparse.Namespace) -> str:
    if options.device in ("cpu", "cuda"):
        return str(options.device)
    return (
        "cuda" if options.memory is not None or options.gpus is not None or gpu_names() else "cpu"
    )


def _memory_bytes(options: argparse.Namespace, kind: str) -> int:
    if options.memory is not None:
        if not 0 < options.memory < 2**20:
            raise CliError(
                f"--memory {options.memory:g}: use the GiB of one GPU, such as 80.", USAGE_STATUS
            )
        return int(options.memory * GIB)
    size = host_memory_bytes() if kind == "cpu" else gpu_memory_bytes()
    if not size:
        raise CliError(
            "this machine has no GPU whose memory is known: add --memory GIB, such as --memory 80.",
            USAGE_STATUS,
        )
    return size


def _engine_options(options: argparse.Namespace) -> list[GivenOption]:
    """Return vLLM's options among those of the command line; raises `CliError`."""
    words = [*options.engine_args]
    for name in OPTIONS:
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    try:
        given, others = read_options(words)
        if others:
            raise OptionError(f"{others[0]!r} is no option: vLLM's options begin with --.")
        check_ranges(given)
        check_values(given)
    except OptionError as error:
        raise CliError(str(error), USAGE_STATUS) from error
    return given


def _divisions(options: argparse.Namespace, facts: ModelFacts, ranks: int) -> Iterator[Division]:
    """Yield the ways to hold the weights that the options leave."""
    shapes: list[Mixed] = []
    try:
        shapes = [read_mixed(text) for text in (options.mixed or "").split(",") if text]
    except MixedError as error:
        raise CliError(f"--mixed: {error}", USAGE_STATUS) from error
    whole = options.whole_layers or 0
    count = 0
    for each in divisions(facts.size, ranks, shapes, whole):
        wrong = [str(shape) for shape in shapes if shape.width not in each.widths]
        if wrong:
            raise CliError(
                f"--mixed {wrong[0]}: groups of this model on {ranks} GPUs are "
                f"{', '.join(map(str, each.widths))} wide.",
                USAGE_STATUS,
            )
        if options.weight_parts not in (None, each.parts):
            continue
        if options.borrow not in (None, each.borrow) and each.parts > 1:
            continue
        count += 1
        yield each
    if not count:
        raise CliError(
            f"--weight-parts {options.weight_parts} does not go with {ranks} GPUs and this model's "
            "heads: use a power of two up to the widest group.",
            USAGE_STATUS,
        )


def as_json(plan: ModelPlan) -> dict[str, Any]:
    """Return the plan as JSON: bytes and tokens, unless a name says otherwise."""
    size, element = plan.facts.size, plan.facts.element
    return {
        "model": plan.name,
        "elements": size.elements,
        "bytes_per_element": {
            "linear": element.linear,
            "experts": element.experts,
            "other": element.other,
            "kv": element.kv,
        },
        "device": plan.device.kind,
        "ranks": plan.ranks,
        "memory_bytes": plan.device.memory_bytes,
        "share": plan.device.share,
        "max_model_len": plan.facts.length,
        "tokens_per_step": plan.facts.limits.tokens,
        "tasks": plan.facts.limits.tasks,
        "kv_bytes_per_token": plan.facts.geometry.page_bytes // plan.facts.block_tokens,
        "host_kv_tokens": plan.host_tokens,
        "cells": [_cell_json(cell) for cell in plan.cells],
    }


def _cell_json(cell: CellPlan) -> dict[str, Any]:
    return {
        "weight_parts": cell.division.parts,
        "borrow": cell.division.borrow if cell.division.parts > 1 else None,
        "whole_layers": cell.division.whole_layers,
        "widths": list(cell.division.widths),
        "fits": cell.fits,
        "reason": cell.reason,
        "advice": cell.advice,
        "room_bytes": cell.room_bytes,
        "weights_bytes": cell.held.weights,
        "ring_bytes": cell.held.ring,
        "whole_layers_bytes": cell.held.whole_layers,
        "activations_bytes": cell.other.activations,
        "graphs_bytes": cell.other.graphs,
        "communicators_bytes": cell.other.communicators,
        "workspace_bytes": cell.other.workspace,
        "kv_bytes": cell.kv_bytes,
        "pages": cell.pages,
        "rank_tokens": cell.rank_tokens,
        "layouts": [
            {
                "layout": each.layout,
                "group_tokens": list(each.group_tokens),
                "cell_tokens": each.cell_tokens,
                "longest_request": each.longest_request,
            }
            for each in cell.layouts
        ],
    }


def _narrow_groups(plan: ModelPlan) -> Iterator[str]:
    """Yield why no group has all ranks, if so."""
    widest = max(cell.division.widths[-1] for cell in plan.cells)
    of_ranks = plan.ranks & -plan.ranks  # The largest power of two that divides the ranks.
    if widest < of_ranks:
        why = "a wider one does not divide the model's heads, layers' sizes or experts"
    else:
        why = f"widths are powers of two that divide {plan.ranks}"
    if widest < plan.ranks:
        yield f"No group is wider than {widest}: {why}."


def _lines(plan: ModelPlan) -> Iterator[str]:
    facts, size = plan.facts, plan.facts.size
    many = "s" if plan.ranks > 1 else ""
    unit = f"GPU{many} of" if plan.device.kind == "cuda" else f"rank{many} on the CPU, in"
    used = f", of which {plan.device.share:g} is used" if plan.device.kind == "cuda" else ""
    yield (
        f"{plan.name}: {_count(size.elements)} weights, {size.layers} layers, "
        f"{facts.geometry.page_bytes // facts.block_tokens / 1024:,.0f} KiB of KV per token"
    )
    yield (
        f"{plan.ranks} {unit} {plan.device.memory_bytes / GIB:,.1f} GiB{used}; requests of up to "
        f"{facts.length:,} tokens, {facts.limits.tokens:,} tokens and {facts.limits.tasks:,} tasks "
        "a step"
    )
    yield from _narrow_groups(plan)
    yield ""
    is_cuda = plan.device.kind == "cuda"
    needs = ("activations", "graphs", "communicators", "workspace") if is_cuda else ()
    headers = ("ranks hold", "weights", *needs, "KV", "KV tokens", "starts")
    rows = [
        (
            cell.division.name,
            _gib(cell.held.total),
            *(_gib(getattr(cell.other, name)) for name in needs),
            _gib(cell.kv_bytes),
            f"{cell.rank_tokens:,}" if cell.fits else "-",
            "yes" if cell.fits else "no",
        )
        for cell in plan.cells
    ]
    yield "Of each rank, in GiB:"
    yield format_table(headers, rows)
    for cell in plan.cells:
        if not cell.fits:
            remedy = f" Remedy: {cell.advice}" if cell.advice else ""
            yield f"{cell.division.name}: {cell.reason}{remedy}"
    yield ""
    layouts = [
        (
            cell.division.name,
            names,
            f"{max(first.group_tokens):,}",
            f"{first.cell_tokens:,}",
            f"{first.longest_request:,}",
        )
        for cell in plan.cells
        if cell.fits
        for names, first in _alike(cell)
    ]
    if layouts:
        yield "KV tokens by layout:"
        headers = ("ranks hold", "layout", "widest group", "cell", "longest request")
        yield format_table(headers, layouts)
    if plan.host_tokens is not None:
        yield ""
        yield f"Host memory holds {plan.host_tokens:,} tokens of KV for all ranks."


def _alike(cell: CellPlan) -> Iterator[tuple[str, LayoutPlan]]:
    """Yield the names of layouts whose numbers are the same, and one of them."""
    groups: dict[tuple[int, ...], list[LayoutPlan]] = {}
    for each in cell.layouts:
        groups.setdefault(each.group_tokens, []).append(each)
    for alike in groups.values():
        yield ", ".join(each.layout for each in alike), alike[0]


def _count(elements: int) -> str:
    return f"{elements / 1e9:,.2f} billion" if elements >= 1e8 else f"{elements / 1e6:,.2f} million"


def _gib(size: int) -> str:
    return f"{size / GIB:.{1 if size >= GIB / 10 or not size else 3}f}"
