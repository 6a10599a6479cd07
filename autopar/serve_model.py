"""`make_server`: from the weights of a `ParallelModule` to a `Server`.

structure -> compile_packed -> page_counts -> PackedRunner -> Server
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.front_end import GenerationFacts, adapter_for
from autopar.compile.serving import Apart, compile_packed
from autopar.ir.batch import tensors_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.dump.dump import dumper_for
from autopar.rewrite.compilation import Observer
from autopar.runtime.consistency.rank_checks import agree_on_call
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.served_weights import ServedWeights
from autopar.serving.packed_runner import PackedRunner, PageCounts, page_counts
from autopar.serving.server import Server
from autopar.steps.packed import Packed
from autopar.values import byte_count, one_of, refuse, whole_number, yes_or_no

PAGE_SIZES = {"cpu": 64, "cuda": 256}  # tokens; torch's kernel for CUDA takes multiples of 256
DEFAULT_REQUESTS = 8  # of max_length, on a CPU


@dataclass(frozen=True)
class ServeArguments:
    """The arguments of `autopar.serve`, which documents them, as a server uses them."""

    max_length: int
    cache: int | float | str | None
    page_size: int
    step_tokens: int
    max_running: int
    max_waiting: int
    step_sizes: tuple[int, ...]
    split_kv: bool
    backend: str

    @classmethod
    def checked(
        cls,
        device: str,
        *,
        max_length: int,
        cache: int | float | str | None = None,
        page_size: int | None = None,
        step_tokens: int = 512,
        max_running: int = 64,
        max_waiting: int = 1024,
        step_sizes: Sequence[int] = (),
        split_kv: bool = True,
        backend: str = "eager",
    ) -> ServeArguments:
        """``device``: kind of the ranks' devices. Raises ValueError for what is no such argument."""
        max_length = whole_number("max_length", max_length, least=1)
        max_running = whole_number("max_running", max_running, least=1)
        max_waiting = whole_number("max_waiting", max_waiting)
        step_tokens = max(whole_number("step_tokens", step_tokens, least=1), max_running)  # all may decode in one step
        backend = one_of("backend", backend, ("eager", "inductor"))
        size = whole_number("page_size", page_size or PAGE_SIZES[device], least=1)
        sizes = _step_sizes(step_sizes, step_tokens, backend)
        split_kv = yes_or_no("split_kv", split_kv)
        return cls(max_length, cache, size, step_tokens, max_running, max_waiting, sizes, split_kv, backend)


def make_server(
    model: ServedWeights,
    asked: ServeArguments,
    keep_unsharded: bool,
    example_batch: Mapping[str, Any] | None,
    dump: str | Path | None = None,
) -> Server:
    """See `autopar.serve`, which documents the arguments. Collective."""
    groups = model.groups
    with error_context("serve"):
        keep_unsharded = yes_or_no("keep_unsharded", keep_unsharded)
        agree_on_call(groups, {**dataclasses.asdict(asked), "keep_unsharded": keep_unsharded})
        root = model.structure()
        facts = generation_facts(root, example_batch)
        check_positions(root, facts, asked.max_length)
        folder = dumper_for(dump)
        packed = packed_model(
            root, facts, groups.mesh, model.parameter_plan(), asked.max_length, lift_to_float64=model.lift_to_float64,
            split_kv=asked.split_kv, gathers_ahead=keep_unsharded, buffers=model.values(),
            observers=[folder] if folder is not None else [],
        )  # fmt: skip
        if folder is not None:
            folder.add_packed(packed)
        limit = packed.plan.options.memory_limit
        counts = pages_of(packed, asked, groups.device, limit, model.values())
        runner = PackedRunner(packed, groups, model, counts, asked.backend, asked.step_sizes, asked.max_running)
        return server_of(runner, groups, asked, facts)


def server_of(runner: PackedRunner, groups: Groups, asked: ServeArguments, facts: GenerationFacts) -> Server:
    """The server that drives a runner."""
    return Server(
        runner, groups, max_length=asked.max_length, vocabulary=runner.packed.vocabulary,
        step_tokens=asked.step_tokens, max_running=asked.max_running, max_waiting=asked.max_waiting,
        eos_token_ids=facts.eos_token_ids, generation_config=facts.config,
    )  # fmt: skip


def generation_facts(model: nn.Module, example_batch: Mapping[str, Any] | None) -> GenerationFacts:
    """How a model generates: its adapter knows, or it has one input of whole numbers."""
    adapter = adapter_for(model)
    if adapter is not None:
        return adapter.generation(model)
    given = {
        name: x for name, x in tensors_of(dict(example_batch or {})).items() if x.dtype in (torch.int64, torch.int32)
    }
    given = {name: x for name, x in given.items() if name not in ("labels", "targets", "position_ids")}
    if len(given) != 1:
        raise ValueError(
            f"serve: needs to know which input of {type(model).__name__} is the token ids, found "
            f"{', '.join(given) or 'none'}; pass example_batch={{name: ids}}"
        )
    return GenerationFacts(next(iter(given)))


def check_positions(model: nn.Module, facts: GenerationFacts, max_length: int) -> None:
    """Raises ValueError for a ``max_length`` beyond the model's positions."""
    if facts.max_length and max_length > facts.max_length:
        raise ValueError(
            f"serve: max_length {max_length} is beyond the {facts.max_length} positions of {type(model).__name__}; "
            f"lower it to {facts.max_length}"
        )


def packed_model(
    root: nn.Module,
    facts: GenerationFacts,
    mesh: Mesh,
    fixed: Plan | None,
    max_length: int,
    *,
    options: Options | None = None,
    lift_to_float64: bool = False,
    split_kv: bool = True,
    gathers_ahead: bool = False,
    buffers: Mapping[str, Tensor] | None = None,
    observers: Sequence[Observer] = (),
    apart: Apart = "",
) -> Packed:
    """The model captured for one row of all positions per data rank. ``fixed``: the plan of the parameters, or None.
    ``buffers``: their values by name; those of parameters may be among them. ``apart``: what other ranks compute."""
    row = torch.empty(mesh.data_size, max_length, dtype=torch.int64, device="meta")
    return compile_packed(
        root, {facts.tokens: row}, facts.tokens, mesh, options, fixed, lift_to_float64=lift_to_float64,
        split_kv=split_kv, gathers_ahead=gathers_ahead, buffers=buffers, apart=apart, observers=observers,
    )  # fmt: skip


def _step_sizes(sizes: Sequence[int], step_tokens: int, backend: str) -> tuple[int, ...]:
    if not sizes and backend == "inductor":  # which compiles for each size
        return (*(1 << i for i in range((step_tokens - 1).bit_length())), step_tokens)
    found = tuple(sorted(whole_number("step_sizes", size, least=1) for size in sizes))
    if found and found[-1] < step_tokens:
        raise refuse("step_sizes", f"a largest size of at least step_tokens, {step_tokens}", sizes)
    return found


def pages_of(
    packed: Packed, asked: ServeArguments, device: torch.device, limit: int | None, values: Mapping[str, Tensor]
) -> PageCounts:
    """How many pages fit. ``limit``: of memory, of which ``values`` have taken some."""
    size = _cache_bytes(asked.cache, packed, device, limit, values)
    return page_counts(packed, asked.page_size, size, asked.step_tokens)


def _cache_bytes(
    asked: Any, packed: Packed, device: torch.device, limit: int | None, values: Mapping[str, Tensor]
) -> int:
    """Bytes of the cache per rank."""
    if asked is not None:
        return byte_count("cache", asked)
    per_token = sum(layer.bytes_per_token for layer in packed.layers)
    if limit:
        left = limit - sum(x.nbytes for x in values.values())
        if left <= 0:
            raise ValueError(
                f"serve: a memory limit of {limit} bytes leaves nothing for a cache; raise it or pass cache="
            )
        return left
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.9 * free)
    return DEFAULT_REQUESTS * (packed.max_length + 2 * PAGE_SIZES["cpu"]) * per_token
