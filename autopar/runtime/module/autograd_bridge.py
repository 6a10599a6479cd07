"""A forward step as one autograd node, so that ``model(**batch).loss.backward()`` does what it does in torch.

    parameters ──> Step ──> outputs that depend on a parameter

Parameters are the node's inputs, so autograd delivers their gradients (`.grad`, hooks, `torch.autograd.grad`).
A compiled step differentiates some of the outputs: at first the losses. When a gradient arrives at another output, a
step that differentiates it too is compiled and the forward runs again; later forwards use that step directly.

What the backward reads must be as the forward left it: torch's version counters are compared, as torch does. With
`torch.utils.checkpoint`, torch's backward would read some values a second time. A step reads them once, so these must
not change either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

from autopar.adapters.autograd import keeps_graph, version_of
from autopar.adapters.dtensor import as_plain, local_of
from autopar.adapters.hooks import has_gradient_hooks, skip_hooks_without_gradient
from autopar.errors import refusal_like
from autopar.ir.graph import ancestors, outputs
from autopar.ir.placement import Replicate
from autopar.runtime.exec.buffer_updates import with_refusal
from autopar.runtime.exec.executor import Executor, PausedStep
from autopar.runtime.inputs.outputs import placements_of
from autopar.steps.graphs import grad, of, output, output_place
from autopar.steps.of_rank import backwards

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
_NO_GRAPH = (
    "backward(create_graph=True): needs a graph of the backward, found a compiled step, which has none; compute a "
    "gradient penalty in the forward of the model, or leave create_graph out"
)
Again = Callable[[tuple[str, ...]], Executor]  # names of outputs -> the step that has gradients for them


@dataclass
class Forward:
    """One run of a forward: the step, its inputs and outputs.

    values: state by original name and inputs by path, as the forward read them. parameters: by original name, frozen
    ones too. again: compiles the same step, differentiating further outputs. unlike: names what the forward has read
    and has changed since, "" if nothing has.
    """

    executor: Executor
    values: Mapping[str, Tensor]
    paused: PausedStep
    parameters: Mapping[str, nn.Parameter]
    again: Again
    unlike: Callable[[], str]
    used: bool = False
    shown: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)  # tensors returned to the user, by output

    def __post_init__(self) -> None:
        stage, specs = self.executor.compiled.stage, self.executor.specs
        taken = {stage.aliases.get(name, name) for step in backwards(stage) for name in step.inputs}
        taken |= {stage.gathered[name] for name in taken & stage.gathered.keys()}  # torch would read the parameter
        read = {specs[n].name for n in taken if n in specs and specs[n].kind != "seed"}
        read |= {*(self.executor.compiled.signature.recomputed or ())}
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        # Operators on a DTensor bump the version of the DTensor, those on its local tensor that of the local tensor.
        past = {n for n in self.executor.buffers.written.values() if n not in self.paused.kept}  # never read
        self._given = _versions({n: x for n, x in self.values.items() if n not in past}) + _versions(self.parameters)
        self._read = [entry for entry in self._given if entry[0] in read]
        self._read += _versions({f"the value of {of(n)}": x for n, x in self.paused.saved})

    @property
    def differentiable(self) -> list[int]:
        """The outputs that depend on a parameter that requires a gradient."""
        return [output_place(name) for name in self.executor.compiled.stage.dependent]

    def watch(self, name: str, output: Tensor) -> None:
        """Watch an output that the user gets: it must not be written to where it aliases a saved value, nor be asked
        for its gradient where the step itself has computed the loss from it."""
        self.shown[name] = weakref.ref(output)
        if not isinstance(output, DTensor):
            return
        kept = {x.untyped_storage().data_ptr() for _, x in self.paused.saved}
        if local_of(output).untyped_storage().data_ptr() in kept:
            self._read += _versions({f"output {name}": output.detach()})  # the output itself holds this object

    def check_asked(self, tangents: Collection[int]) -> None:
        """Raises ValueError for a hook or `retain_grad` on an output from which the step itself has computed another
        output that is differentiated: no gradient flows back to it."""
        made = outputs(self.executor.compiled.local)
        for k in self.differentiable:
            name = self.executor.compiled.signature.outputs[k].name
            shown = self.shown[name]() if name in self.shown else None
            with as_plain():
                asked = shown is not None and (shown.retains_grad or shown._backward_hooks)
            if asked and _copied(made[k]) in ancestors([made[j] for j in tangents if j != k]):
                raise ValueError(
                    f"backward: a hook or retain_grad() asks for the gradient of output {name}, found that the loss is "
                    "computed from it within the compiled step, which returns no gradient for it; compute the loss "
                    "from the outputs (outputs_with_grad=True)"
                )

    def gradients(self, tangents: Mapping[int, Tensor], keep: bool) -> dict[str, Tensor]:
        """Tangents by output -> gradients (this rank's shards) by original name of the parameter."""
        if self.used:
            raise RuntimeError(
                "backward: this forward was already differentiated and its saved values are freed; run the model "
                "again, or keep them with backward(retain_graph=True)"
            )
        self.used = not keep
        missing = [k for k in tangents if output(k) not in self.executor.program.tangents]
        if missing:
            return self._run_again(tangents, missing)
        _check(self._read)
        self._check_remade()
        return self._run_backward(self.executor, self.paused, tangents, keep)

    def _check_remade(self) -> None:
        """Raises ValueError where `torch.utils.checkpoint` would recompute from values that have changed by now."""
        if self.executor.compiled.signature.recomputed is not None and (changed := self.unlike()):
            raise ValueError(
                "backward: torch.utils.checkpoint would recompute the forward with the values of now, a compiled step "
                f"uses those of the forward, found that {changed} has changed since; change it after the backward"
            )

    def _run_again(self, tangents: Mapping[int, Tensor], missing: Sequence[int]) -> dict[str, Tensor]:
        _check(self._given)
        self._check_remade()
        names = [self.executor.compiled.signature.outputs[k].name for k in missing]
        executor = self.again(tuple(names))
        _, paused = executor.run_forward(self.values)
        return self._run_backward(executor, paused, tangents)

    def _run_backward(
        self, executor: Executor, paused: PausedStep, tangents: Mapping[int, Tensor], keep: bool = False
    ) -> dict[str, Tensor]:
        places = [output_place(name) for name in executor.program.tangents]
        given = {
            output(k): self._own_part(executor, k, tangents[k]) if k in tangents else _no_tangent(executor, k)
            for k in places
        }
        found = executor.run_backward(paused, given, keep)
        roots = executor.compiled.stage.roots
        asked = {output(k) for k in tangents}
        unmade = {name for name, outputs in roots.items() if not asked & set(outputs)}  # torch returns None for them
        return {executor.specs[n].name: gradient for n, gradient in found.items() if grad(n) not in unmade}

    def _own_part(self, executor: Executor, k: int, tangent: Tensor) -> Tensor:
        """The gradient of a replicated output is summed over the axis, so only one rank of the axis contributes it."""
        copies = [a for a, p in placements_of(executor.compiled, k).items() if isinstance(p, Replicate)]
        if tangent.dim() and any(executor.groups.coordinate[a] for a in copies):
            return torch.zeros_like(tangent)
        return tangent.contiguous()


def _copied(node: Node) -> Node:
    """The node that an output copies."""
    while node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _versions(values: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    return [(n, x, version_of(x)) for n, x in values.items() if isinstance(x, Tensor) and not x.is_inference()]


def _check(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    for name, x, version in versions:
        if version_of(x) != version:
            # The text of torch's own error. Where torch would not raise, its backward saves other tensors (such as a
            # product with a weight instead of the weight), and this is a refusal.
            raise refusal_like(
                RuntimeError(),
                "backward: one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {name} is at version {version_of(x)}; expected version {version} instead; "
                "differentiate before you write to it",
            )


def _no_tangent(executor: Executor, k: int) -> Tensor:
    like = outputs(executor.compiled.stage.forward.graph)[k].meta["val"]
    return torch.zeros(like.shape, dtype=like.dtype, device=executor.groups.device)


def attach(forward: Forward, results: list[Any]) -> None:
    """Make the outputs that depend on a parameter outputs of an autograd node. Changes the list ``results``."""
    chosen = [results[k] for k in forward.differentiable]
    if chosen:
        attached = _StepFunction.apply(forward, chosen, *forward.trained.values())
        for k, x in zip(forward.differentiable, attached, strict=True):
            results[k] = x


def with_second_forward(
    outputs: list[Tensor], parameters: Mapping[str, nn.Parameter], backward: Callable[[dict[int, Tensor]], None]
) -> list[Tensor]:
    """Outputs of a step without gradients, whose backward runs the step once more, with gradients: ``backward`` is
    called with the gradients of the outputs by their place."""
    floating = [k for k, x in enumerate(outputs) if x.is_floating_point()]
    trained = next((p for p in parameters.values() if p.requires_grad), None)
    if trained is None or not floating:
        return outputs
    read = _versions(parameters)

    def run(tangents: Sequence[Tensor | None]) -> None:
        _check(read)
        backward({k: t for k, t in zip(floating, tangents, strict=True) if t is not None})

    anchor = torch.zeros((), requires_grad=True, device=outputs[floating[0]].device)
    found = _SecondForward.apply(run, anchor, *(outputs[k] for k in floating))
    made = dict(zip(floating, found, strict=True))
    return [made.get(k, x) for k, x in enumerate(outputs)]


class _SecondForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[Tensor | None]], None], _: Tensor, *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(_NO_GRAPH)
        ctx.run(tangents)
        return (None, None, *(None for _ in tangents))


def refuse_gradients(results: list[Any], words: str, device: torch.device) -> None:
    """Make outputs raise ``words`` when they are differentiated: torch would have gradients here, this step has not."""
    places = [k for k, x in enumerate(results) if isinstance(x, Tensor) and x.is_floating_point()]
    refused = with_refusal(words, [results[k] for k in places], device)
    for k, x in zip(places, refused, strict=True):
        results[k] = x


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, results: list[Tensor], *parameters: nn.Parameter) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run = forward
        return tuple(x.detach() for x in results)  # not the tensors themselves: they may be saved for the backward

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        run: Forward = ctx.run
        if torch.is_grad_enabled():
            raise ValueError(_NO_GRAPH)
        given = {
            k: t.full_tensor() if isinstance(t, DTensor) else t
            for k, t in zip(run.differentiable, tangents, strict=True)
            if t is not None
        }
        run.check_asked(given)
        found = run.gradients(given, keeps_graph())
        made = {n: x.detach().contiguous() for n, x in found.items()}
        skip_hooks_without_gradient([p for n, p in run.trained.items() if n not in made and has_gradient_hooks(p)])
        wanted = zip(run.trained.items(), ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(p.alike(made[n]) if need and n in made else None for (n, p), need in wanted))  # type: ignore[attr-defined]
