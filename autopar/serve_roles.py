"""`serve_roles`: attention and experts of a served model on ranks of their own.

agree -> graphs of this rank's role -> its weights -> PingPongRunner -> Server       attention
                                                   -> ExpertServer                   experts

What one role refuses is refused on all ranks of both, before weights move.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.adapters.copying.fake import skeleton_of
from autopar.capture.front_end import GenerationFacts, adapter_for, buffers_of, model_dtypes
from autopar.compile.expert_role import compile_experts
from autopar.compile.serving import CUTS, Apart
from autopar.errors import is_refusal
from autopar.ir.graph import calls_of
from autopar.options import Options
from autopar.report.dump.dump import dumper_for
from autopar.runtime.comm.pairs import AnsweringPairs, AskingPairs
from autopar.runtime.comm.rows import RowFormat
from autopar.runtime.fault.errors import board, error_context
from autopar.runtime.mesh.process_groups import Groups, mesh_of
from autopar.runtime.mesh.roles import Roles
from autopar.runtime.module.argument_checks import check_module
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.role_weights import RoleWeights
from autopar.serve_model import ServeArguments, check_positions, generation_facts, packed_model, pages_of, server_of
from autopar.serving.expert_server import ExpertServer
from autopar.serving.paged_cache import PagedCache
from autopar.serving.ping_pong import PingPongRunner
from autopar.serving.server import Server
from autopar.steps.packed import Packed
from autopar.steps.packed_experts import PackedExperts
from autopar.values import one_of, whole_number, yes_or_no

T = TypeVar("T")
MICROBATCHES = 3  # by default; the best of most deployments (MegaScale-Infer, 4.1)


@dataclasses.dataclass(frozen=True)
class RoleArguments:
    """Arguments of `autopar.serve` that are of roles: microbatches, apart, and those of `parallelize`."""

    microbatches: int
    apart: Apart
    lift_to_float64: bool
    options: Options

    @classmethod
    def checked(
        cls,
        max_running: int,
        microbatches: int | None = None,
        apart: str | None = None,
        keep_unsharded: bool | None = None,
        lift_to_float64: bool = False,
        precision: Any = "none",
        **others: Any,
    ) -> RoleArguments:
        """Raises ValueError for what roles do not take."""
        if keep_unsharded is not None:
            others["keep_unsharded"] = keep_unsharded
        if others:
            raise ValueError(
                f"serve: roles take lift_to_float64 and precision, found {next(iter(others))!r}; leave it out, or "
                "serve on one mesh"
            )
        count = whole_number("microbatches", MICROBATCHES if microbatches is None else microbatches, least=1)
        if count > max_running:
            raise ValueError(
                f"serve: {count} microbatches need as many requests, found max_running={max_running}; raise it to "
                f"{count}, or use fewer microbatches"
            )
        role: Any = one_of("apart", "experts" if apart is None else apart, tuple(CUTS))
        return cls(count, role, yes_or_no("lift_to_float64", lift_to_float64), Options(precision=precision))


def serve_roles(
    model: nn.Module,
    roles: Roles,
    arguments: Mapping[str, Any],
    of_roles: Mapping[str, Any],
    folder: str | Path | None,
    example_batch: Mapping[str, Any] | None,
    dump: str | Path | None,
) -> Server | ExpertServer:
    """See `autopar.serve`, which documents the arguments. Collective over both roles."""
    groups = Groups(roles.mesh)
    with _refusals_withdrawn(), error_context("serve"):

        def check() -> tuple[ServeArguments, RoleArguments]:
            if isinstance(model, ParallelModule):
                raise ValueError(
                    "serve: roles have weights of their own, found a model that is parallelized; pass the model itself"
                )
            if roles.in_use:
                raise ValueError("serve: these roles serve already; close that server first, on all ranks")
            check_module(model)
            asked = ServeArguments.checked(groups.device.type, **arguments)
            if asked.backend != "eager":
                raise ValueError(
                    f"serve: roles run their graphs eagerly, found backend={asked.backend!r}; leave it out"
                )
            return asked, RoleArguments.checked(asked.max_running, **of_roles)

        (asked, how), found = _on_both(roles, "the arguments", check, _in_words)
        _check_alike(roles, found)
        buffers, known = buffers_of(model)
        weights = _weights(model, roles, groups, buffers, folder, how.options)
        weights.agree()
        root = weights.structure()
        facts = generation_facts(root, example_batch)
        masks = {name: x for name, x in known.items() if x is not None}
        packed, found = _on_both(
            roles, "the graphs", lambda: _graphs(roles, root, asked, how, facts, dump, masks), _shown
        )
        rows = _rows(roles, found)
        _on_both(roles, "the shards", lambda: weights.hold(packed.parameters), _nothing)
        if isinstance(packed, Packed):
            server, _ = _on_both(
                roles, "the server", lambda: _server(packed, roles, weights, rows, asked, how, facts), _nothing
            )
            return server
        _on_both(roles, "the server", lambda: None, _nothing)
        values = {**packed.constants, **weights.values()}
        return ExpertServer(packed, groups, values, AnsweringPairs(roles, groups, rows, how.microbatches))


@contextmanager
def _refusals_withdrawn() -> Iterator[None]:
    """Context manager: what all ranks refuse is no failure of this one; they may serve again."""
    try:
        yield
    except ValueError as error:
        if is_refusal(error):
            board().whole.clear()
        raise


def _server(
    packed: Packed,
    roles: Roles,
    weights: RoleWeights,
    rows: list[RowFormat],
    asked: ServeArguments,
    how: RoleArguments,
    facts: GenerationFacts,
) -> Server:
    groups = weights.groups
    counts = pages_of(packed, asked, groups.device, None, weights.values())
    runner = PingPongRunner(
        packed, groups, weights, counts, asked.backend, asked.step_sizes, asked.max_running,
        pairs=AskingPairs(roles, groups, rows), layers=len(_asks(packed)), microbatches=how.microbatches,
    )  # fmt: skip
    return server_of(runner, groups, asked, facts)


def _nothing(made: Any) -> None:
    """What is shown of it."""


def _weights(
    model: nn.Module,
    roles: Roles,
    groups: Groups,
    buffers: Mapping[str, Tensor],
    folder: str | Path | None,
    options: Options,
) -> RoleWeights:
    adapter = adapter_for(model)
    recipes = functools.partial(adapter.recipes_to_load, skeleton_of(model)) if adapter is not None else None
    return RoleWeights(model, roles, groups, buffers, folder, recipes, model_dtypes(model, options.precision).stored)


def _on_both(roles: Roles, subject: str, call: Callable[[], T], shown: Callable[[T], Any]) -> tuple[T, list[Any]]:
    """The result of a call, and what all ranks of both roles show of theirs. Raises on all of them what one refuses."""
    made: list[T] = []
    try:
        made.append(call())
        said = {"found": shown(made[0])}
    except Exception as error:
        if not is_refusal(error):
            raise
        said = {"error": str(error)}

    def reply(texts: list[str]) -> str:
        answers = [json.loads(text.partition("\n")[2]) for text in texts]
        refusals = [answer["error"] for answer in answers if "error" in answer]
        return json.dumps(refusals[0] if refusals else [answer["found"] for answer in answers])

    found = json.loads(roles.agree("serve", f"{subject}\n{json.dumps(said)}", reply))
    if isinstance(found, str):
        raise ValueError(found)
    return made[0], found


def _in_words(arguments: tuple[ServeArguments, RoleArguments]) -> dict[str, str]:
    asked, how = map(vars, arguments)
    return {name: repr(value) for name, value in {**asked, **how}.items()}


def _check_alike(roles: Roles, found: list[dict[str, str]]) -> None:
    """Raises ValueError for other arguments on other ranks."""
    for rank, given in enumerate(found):
        for name, text in given.items():
            if text != found[0][name]:
                raise ValueError(
                    f"serve: all ranks of both roles need the same arguments, found {name}={text} on "
                    f"{roles.named(rank)} and {found[0][name]} on rank 0; call it alike everywhere"
                )


def _graphs(
    roles: Roles,
    root: nn.Module,
    asked: ServeArguments,
    how: RoleArguments,
    facts: GenerationFacts,
    dump: str | Path | None,
    masks: Mapping[str, Tensor],
) -> Packed | PackedExperts:
    """What this rank's role runs."""
    mesh, folder = mesh_of(roles.mesh), dumper_for(dump, roles.role)
    more: dict[str, Any] = {
        "apart": how.apart, "lift_to_float64": how.lift_to_float64, "buffers": masks,
        "observers": [folder] if folder is not None else [],
    }  # fmt: skip
    if roles.role == "experts":
        row = torch.empty(1, asked.max_length, dtype=torch.int64, device="meta")
        return compile_experts(root, {facts.tokens: row}, facts.tokens, mesh, how.options, **more)
    check_positions(root, facts, asked.max_length)
    packed = packed_model(
        root, facts, mesh, None, asked.max_length, options=how.options, split_kv=asked.split_kv, gathers_ahead=True,
        **more,
    )  # fmt: skip
    if folder is not None:
        folder.add_packed(packed)
    if asked.cache is not None:
        _check_cache(packed, asked)
    return packed


def _check_cache(packed: Packed, asked: ServeArguments) -> None:
    """Raises ValueError for a cache that is too small, before weights move."""
    counts = pages_of(packed, asked, torch.device("cpu"), None, {})
    PagedCache(counts.pages, packed.windows, counts.page_size, asked.max_length, asked.step_tokens, counts.page_bytes)


def _asks(packed: Packed) -> list[Any]:
    """The layers that attention asks for."""
    (stage,) = packed.stages
    return calls_of(stage.graph.graph.graph, torch.ops.autopar.ask_experts.default)


def _shown(packed: Packed | PackedExperts) -> dict[str, Any]:
    """What the other role must know of a role's graphs."""
    if isinstance(packed, Packed):
        return {"layers": len(_asks(packed))}
    rows = [
        (x.num_experts, x.top_k, x.hidden, *(str(t).removeprefix("torch.") for t in (x.dtype, x.weights_dtype)))
        for x in packed.layers
    ]
    return {"layers": len(rows), "rows": rows}


def _rows(roles: Roles, found: list[Any]) -> list[RowFormat]:
    """What goes between the roles, per layer. Raises ValueError for roles with other layers."""
    asked, answered = found[0], found[roles.ranks_of("experts")[0]]
    if asked["layers"] != answered["layers"]:
        raise ValueError(
            f"serve: both roles need the same model, found {asked['layers']} layers of experts on rank 0 and "
            f"{answered['layers']} on {roles.named(roles.ranks_of('experts')[0])}; build it alike"
        )
    return [
        RowFormat(experts, top_k, hidden, getattr(torch, dtype), getattr(torch, weights, None))
        for experts, top_k, hidden, dtype, weights in answered["rows"]
    ]
