"""`verify`: compares the loss and every gradient of a model on a mesh with those of one process, on every rank.

    report = autopar.verify(model, mesh, batch, zero=3)      on every rank, with the whole batch
    print(report); report.raise_for_mismatch()

    one process:   model(**batch).loss.backward()            eager, the unmodified model
    the mesh:      parallelize(model, mesh, ...).train_step(**shard of the batch)

Both run on copies; the model is not changed. By default both compute in float64, float32 islands included, so that
only rounding remains of a difference: about 1e-15, and never above 1e-10. Dropout stays on: the eager run uses the
masks that the mesh draws, so a mask that depends on the mesh is a mismatch, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node

from autopar.adapters.copying.fake import copy_with, skeleton_of, twin_of
from autopar.adapters.quantized_weights import with_plain_weights
from autopar.api import load_adapters, parallelize
from autopar.capture.front_end import adapter_for, model_dtypes
from autopar.capture.trace.export import flatten, paths, unflatten
from autopar.compile.model import plan_model
from autopar.compile.parameters import known_batch_dims
from autopar.ir.batch import part_of_batch, tensors_of
from autopar.ir.compute_dtypes import cast_around
from autopar.ir.mesh import Mesh
from autopar.lift_to_float64 import LiftFloat32
from autopar.ops.few_bits.delayed_scales import DelayedScales
from autopar.ops.few_bits.eager_products import ScaledProducts
from autopar.ops.few_bits.scaled_products import VALUES
from autopar.ops.random_recipes import shared_random
from autopar.ops.traits import aliases
from autopar.options import Options
from autopar.plan import AxisShare, Plan
from autopar.planner.batch_dims import likely_dims
from autopar.precision import Precision, a_precision
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import mesh_of
from autopar.runtime.module.argument_checks import check_module
from autopar.runtime.module.parallel_module import step_seed
from autopar.values import number, yes_or_no

EXACT = 1e-10
# dtype -> (rtol, atol): an error may reach max(rtol * largest value of the tensor, atol). bfloat16 has 8 bits, float16
# 11, float32 24, operands of products in few bits 4; the margin is for rounding that accumulates with a model's depth.
TOLERANCES = {
    torch.float64: (EXACT, EXACT),
    torch.float32: (1e-4, 1e-6),
    torch.float16: (2e-2, 1e-3),
    torch.bfloat16: (1e-1, 4e-3),
    torch.float8_e4m3fn: (2.5e-1, 1e-2),
}


@dataclass(frozen=True)
class Compared:
    """One compared tensor.

    ``error``: largest absolute difference; ``reference``: largest absolute value in one process; ``allowed``: the
    largest error that passes. ``note``: another mismatch, such as a gradient on one side only.
    """

    name: str
    error: float
    reference: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.note and self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """``error / allowed``; infinite where the tensors cannot be compared."""
        return math.inf if self.note or math.isnan(self.error) else self.error / self.allowed


@dataclass(frozen=True)
class Report:
    """The result of `verify`: equal on all ranks, with the worst error of any rank.

    ``loss`` is that of the mesh, ``reference_loss`` that of one process (sums, if the model returns several losses);
    ``parameters`` holds one entry per parameter with a gradient; ``without_gradient`` names those that have none on
    either side. ``precision``: the dtypes of the computation, "float64 with parts in float32"; tolerances are those of
    the coarsest. ``shares``: what each axis of the mesh shards, and what stays replicated on it. ``wide``: with
    products in few bits, how far one process is from one whose products are not.
    """

    mesh: str
    exact: bool
    loss: float
    reference_loss: float
    loss_error: Compared
    parameters: tuple[Compared, ...]
    without_gradient: tuple[str, ...] = ()
    precision: str = ""
    shares: tuple[AxisShare, ...] = ()
    wide: str = ""

    @property
    def entries(self) -> tuple[Compared, ...]:
        """The loss and all parameters, worst first."""
        return tuple(sorted((self.loss_error, *self.parameters), key=lambda e: -e.ratio))

    @property
    def passed(self) -> bool:
        return all(e.passed for e in self.entries)

    def __str__(self) -> str:
        return self.render()

    def render(self, rows: int = 20, width: int = 120) -> str:
        """A table of the worst ``rows``."""
        table = Table(title=self._headline(), title_justify="left", width=width)
        table.add_column("tensor", overflow="fold", ratio=1)
        for name in ("error", "allowed", "largest value", ""):
            table.add_column(name, justify="right", no_wrap=True)
        entries = self.entries
        for e in entries[:rows]:
            verdict = "ok" if e.passed else (e.note or "MISMATCH")
            table.add_row(e.name, f"{e.error:.1e}", f"{e.allowed:.1e}", f"{e.reference:.3g}", verdict)
        console = Console(width=width, no_color=True, highlight=False)
        with console.capture() as text:
            console.print(table)
            if len(entries) > rows:
                console.print(f"... and {len(entries) - rows} with smaller errors")
            if self.wide:
                console.print(self.wide)
            for share in self.shares:
                console.print(str(share), *(f"  {part}" for part in share.whole), sep="\n")
        return text.get().rstrip()

    def _headline(self) -> str:
        failed = sum(not e.passed for e in self.entries)
        verdict = f"differs from one process in {failed} of {len(self.entries)}" if failed else "equals one process"
        return (
            f"verify: mesh {self.mesh} {verdict}: loss {self.loss:.12g}, in one process {self.reference_loss:.12g}"
            f"{f' ({self.precision})' if self.precision else ''}"
        )

    def raise_for_mismatch(self) -> None:
        """Raises AssertionError with the table unless everything passed."""
        if not self.passed:
            raise AssertionError(str(self))


def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    lift_to_float64: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Any,
) -> Report:
    """Compare a training step on a mesh with one process: the loss and every gradient. Call it on every rank.

    Args:
        model: with its weights, equal on every rank. It is not changed. Both sides run each module in the mode
            (training or evaluation) that it has.
        mesh: as for `parallelize`.
        batch: the GLOBAL batch as keyword arguments of the forward, equal on every rank; verify takes the dp shard of
            each rank from it. (`train_step` takes the shard; here one process needs all of it.)
        lift_to_float64: compare in float64, float32 islands included, to 1e-10. Otherwise in the model's own dtypes,
            to the `TOLERANCES` of the coarsest one that it computes in: many models compute norms and losses in
            float32 whatever their dtype.
        rtol, atol: an error may reach ``max(rtol * max|reference|, atol)``, per tensor.
        options: as for `parallelize`: zero, sequence_parallel, microbatches, plan, backend, seed ... With a
            ``precision`` the one process computes in it, too; a comparison in float64 leaves out its casts.

    The tolerance is relative to the largest value of each tensor, not to each element: an element that is zero by
    cancellation has no relative accuracy. Raises ValueError as `parallelize` does. Collective.
    """
    model = with_plain_weights(model)
    check_module(model)
    yes_or_no("lift_to_float64", lift_to_float64)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"verify: needs the global batch, keyword arguments of the forward, found a {type(batch).__name__}; "
            "pass a dict such as {'input_ids': ..., 'labels': ...}"
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            number(name, value, 0.0)
    if options.get("aux_loss_scope") == "microbatch":
        raise ValueError(
            'verify: needs aux_loss_scope="global_batch", found "microbatch", whose loss differs from that of one '
            "process; remove the option, or verify without the auxiliary loss"
        )
    load_adapters(model)
    policy = _policy(options, lift_to_float64)
    copied, whole = _prepared(model, batch, lift_to_float64)
    sizes = mesh_of(mesh)
    part = _part(copied, whole, sizes, dist.get_rank(), options)
    seed = int(options.get("seed", 0))
    options.setdefault("example_batch", part)
    parallel = parallelize(copied, mesh, lift_to_float64=lift_to_float64, **options)
    losses = parallel.train_step(**part)
    found = parallel.full_gradients()
    loss = sum(float(x) for x in (losses if isinstance(losses, tuple) else (losses,)))
    own = {name: s.name for s in parallel.parameter_specs for name in (s.name, *s.aliases)}
    alone = copied if lift_to_float64 else computing_in(copied, policy)
    limit = parallel.plan.options.capacity_factor
    how: dict[str, Any] = {"seed": step_seed(seed, 1), "capacity_factor": limit, "lift_to_float64": lift_to_float64}
    products = _products(alone, whole, parallel.plan, sizes)
    with products or contextlib.nullcontext():
        reference_loss, expected = reference(alone, whole, **how)
    wide = _distance(products, (reference_loss, expected), reference(alone, whole, **how)) if products else ""
    expected = {own[name]: g for name, g in expected.items()}

    def limits(dtype: torch.dtype) -> tuple[float, float]:
        default = TOLERANCES[dtype]
        return (default[0] if rtol is None else rtol), (default[1] if atol is None else atol)

    held = {p.dtype for p in copied.parameters()} & set(TOLERANCES)
    islands = set() if lift_to_float64 else _computed_in(parallel.compiled()[-1].local) & set(TOLERANCES) - held
    islands |= {VALUES} if products and not lift_to_float64 else set()
    coarsest = max(held | islands, key=lambda d: TOLERANCES[d][0], default=torch.float64)
    loss_entry = _compared("loss", _scalar(loss), _scalar(reference_loss), limits(coarsest))
    names = [n for n in expected if expected[n] is not None or n in found]
    entries = tuple(_compared(n, found.get(n), expected[n], limits(coarsest)) for n in names)
    without = tuple(n for n in expected if n not in names)
    precision = " with parts in ".join(", ".join(sorted(map(_short, dtypes))) for dtypes in (held, islands) if dtypes)
    shares = parallel.plan.shares
    return _worst(
        Report(str(sizes), lift_to_float64, loss, reference_loss, loss_entry, entries, without, precision, shares, wide)
    )


def reference(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    lift_to_float64: bool = True,
    seed: int | None = None,
    capacity_factor: float = 0.0,
) -> tuple[float, dict[str, Tensor | None]]:
    """Run one process, eager: (sum of the losses, parameter name -> gradient on the CPU). Changes ``.grad`` and the
    buffers of the model. ``seed``: of the step whose dropout masks to use
    (`autopar.runtime.module.parallel_module.step_seed`). ``capacity_factor``: as the option of `parallelize`."""
    load_adapters(model)
    adapter = adapter_for(model)
    model.zero_grad()
    with contextlib.ExitStack() as stack:
        if lift_to_float64:
            stack.enter_context(LiftFloat32())
        arguments = dict(batch)
        if adapter is None and capacity_factor:
            raise ValueError(
                "verify: capacity_factor needs a transformers model, found another one; leave capacity_factor out"
            )
        if adapter is not None:
            stack.enter_context(adapter.reference(model, capacity_factor))
            arguments = adapter.arguments(model, batch)
        with shared_random(seed) if seed is not None else contextlib.nullcontext():
            output = model(**arguments)
        found = {path: x for path, x in paths(output) if isinstance(x, Tensor) and not x.dim() and x.requires_grad}
        losses = [found["loss"]] if "loss" in found else list(found.values())
        if not losses:
            raise ValueError(
                "verify: needs a loss, found no scalar output with a gradient; pass labels, or whatever else the "
                "model computes its loss from"
            )
        total = torch.stack([x.double() for x in losses]).sum()
        total.backward()
    gradients = {n: None if p.grad is None else p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return float(total.detach()), gradients


Gradients = dict[str, Tensor | None]


def _products(model: nn.Module, batch: Mapping[str, Any], plan: Plan, mesh: Mesh) -> ScaledProducts | None:
    """The products of one process in few bits, those that the plan scales; each microbatch and token slice has its own
    scales."""
    weights, count = [name for name, why in plan.products.items() if not why], plan.options.microbatches
    if not weights:
        return None
    alike = plan.options.precision.scales_by_token
    slices = plan.pipeline.token_slices if plan.pipeline is not None and not alike else ()
    rows = _examples_of_each(batch, plan, mesh) if slices or (count > 1 and not alike) else []
    how = plan.options.precision
    delayed = DelayedScales(weights, how.history, how.amax, how.margin) if how.scaling == "delayed" else None
    return ScaledProducts(model, weights, how.scaling, how.wide_weight_gradient, rows, delayed, slices)


def _examples_of_each(batch: Mapping[str, Any], plan: Plan, mesh: Mesh) -> list[Tensor]:
    """The examples of each microbatch of all ranks. Raises ValueError for inputs with another batch dim than the first:
    rows of products would not be those of one example after another."""
    dims = {name: plan.batch_dims.get(name, None if plan.batch_dims else 0) for name in tensors_of(batch)}
    if set(dims.values()) - {0, None}:
        raise ValueError(
            "verify: products in few bits scale microbatches and token slices apart, which needs the batch as the "
            f"first dim of every input, found {dims}; compare with one microbatch"
        )
    examples = next(x.shape[0] for name, x in tensors_of(batch).items() if dims[name] == 0)
    of_each = torch.arange(examples).view(mesh.data_size // mesh.size("ep"), plan.options.microbatches, -1)
    return [x.reshape(-1) for x in of_each.unbind(1)]


def _distance(products: ScaledProducts, few: tuple[float, Gradients], wide: tuple[float, Gradients]) -> str:
    """How far a step of one process is from the one without products in few bits. Raises ValueError if the model
    computes one of the products in a way that one process was not told of."""
    if products.unmet:
        raise ValueError(
            f"verify: one process computes products by torch.nn.functional.linear or addmm in few bits, found another "
            f"one with {sorted(products.unmet)[0]}; name its module in precision.wide"
        )
    loss = abs(few[0] - wide[0]) / max(abs(wide[0]), 1e-30)
    pairs = [(x.double(), y.double()) for n, y in wide[1].items() if y is not None and (x := few[1][n]) is not None]
    errors = [float((x - y).norm() / y.norm()) for x, y in pairs if y.norm() > 0]
    return (
        f"products with {len(products.weights)} weights are in few bits: in one process that changes the loss by "
        f"{loss:.2%} and gradients by {sum(errors) / max(len(errors), 1):.1%} of their norm on average"
    )


def _policy(options: dict[str, Any], lift_to_float64: bool) -> Precision:
    """The precision policy of ``options``, where a comparison in float64 replaces it by float64."""
    plan = options.get("plan")
    policy = a_precision("precision", options.get("precision", plan.options.precision if plan is not None else "none"))
    if lift_to_float64 and "precision" in options and policy.compute:
        options["precision"] = dataclasses.replace(policy, compute="float64", stored="float64", reduce="float64")
    return policy


def computing_in(model: nn.Module, policy: Precision) -> nn.Module:
    """A copy that computes eagerly in the dtypes of a policy: its parameters are cast."""
    dtypes = model_dtypes(model, policy)
    tensors: dict[int, Tensor] = {}
    for x in (*model.parameters(), *model.buffers()):
        made = x.detach().to(dtypes.used.get(id(x), x.dtype), copy=True)
        tensors[id(x)] = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made
    copied = copy_with(model, tensors)
    cast_around(copied, dtypes)
    return copied


def _prepared(model: nn.Module, batch: Mapping[str, Any], lift_to_float64: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Copies of the model and batch; in float64 for the exact comparison."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("verify: needs the weights of the model, found tensors on the meta device; load them first")
    copied = twin_of(model)
    for module in copied.modules():
        if getattr(
            module, "gradient_checkpointing", False
        ):  # recomputation would draw dropout masks twice in the eager run
            setattr(module, "gradient_checkpointing", False)  # noqa: B010  (typed as a tensor or module)
    leaves, spec = flatten(dict(batch))
    if lift_to_float64:
        nn.Module.to(copied, torch.float64)
        leaves = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    return copied, unflatten(leaves, spec)


def _part(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, rank: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's dp shard of the batch, along the batch dims that `parallelize` finds."""
    load_adapters(model)
    skeleton, ranks, plan = skeleton_of(model), mesh.data_size, options.get("plan")
    before = plan.options if plan is not None else Options()
    asked = Options(**{name: options.get(name, getattr(before, name)) for name in ("batch_dims", "static_inputs")})
    dims, tensors = known_batch_dims(skeleton, batch, asked, plan), tensors_of(batch)
    if ranks > 1 and not set(tensors) <= set(dims):
        likely = likely_dims({name: tuple(x.shape) for name, x in tensors.items()}, dims)
        dims = likely | dict(plan_model(skeleton, batch, Mesh.of(dp=ranks), asked, None)[0].batch_dims)
    index, microbatches = (
        mesh.dp_rank_and_size(mesh.coordinate(rank)),
        options.get("microbatches", before.microbatches),
    )
    return part_of_batch(batch, dims, ranks, index, mesh.size("ep"), microbatches)


def _computed_in(graph: GraphModule) -> set[torch.dtype]:
    """The dtypes that a graph rounds to: those of floats computed from floats. Casts of integers do not round."""
    computed = (n for n in graph.graph.nodes if n.op == "call_function" and not aliases(n.target))
    return {n.meta["val"].dtype for n in computed if _is_float(n) and any(map(_is_float, n.all_input_nodes))}


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _compared(name: str, found: Tensor | None, expected: Tensor | None, limits: tuple[float, float]) -> Compared:
    """One tensor against the reference."""
    if found is None or expected is None:
        there = found if found is not None else expected
        assert there is not None
        largest = float(there.abs().max()) if there.numel() else 0.0
        note = "no gradient on the mesh" if found is None else "no gradient in one process"
        return Compared(name, math.nan, largest, limits[1], note)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((found.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    return Compared(name, error, largest, max(limits[0] * largest, limits[1]))


def _worst(report: Report) -> Report:
    """The worst entries over all ranks: a replica that is wrong on one rank only must be reported."""
    if dist.get_world_size() == 1:
        return report
    reports: list[Any] = [None] * dist.get_world_size()
    with error_context("verify"):
        dist.all_gather_object(reports, report)

    def worst(entries: list[Compared]) -> Compared:
        return max(entries, key=lambda e: e.ratio)

    parameters = tuple(worst(list(entries)) for entries in zip(*(r.parameters for r in reports), strict=True))
    first: Report = reports[0]
    loss = worst([r.loss_error for r in reports])
    return dataclasses.replace(first, loss_error=loss, parameters=parameters)
