"""Buffer updates of a step: values that the backward reads are saved, then the new values take effect.

    self.c.mul_(0.5)        the value is written into the tensor, visible through all references, as in torch
    self.c = self.c * 0.5   a new tensor becomes the buffer; the old one is unchanged
    k.lerp_(q, 0.01)        k a frozen parameter (of a momentum encoder): each rank writes to the piece that it stores

A step computes values and writes no buffers itself. So values in a buffer's memory are copied before the write: slots
that the backward reads, and the buffer itself if outputs depend on it whose gradient only another step computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.foreach import copy_all
from autopar.capture.module_state.assigned import Assignment, BufferAlias
from autopar.ir.graph import ancestors, outputs, placeholders
from autopar.ir.storages import shared_outputs, storages
from autopar.runtime.params.sharded_modules import ShardedModules
from autopar.steps.graphs import Compiled, Stage, is_a, output, output_place


def with_refusal(words: str, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The same values; a backward through them raises ValueError with this text."""
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device=device)
        return list(_RefusedGradient.apply(words, anchor, *tensors))


class _RefusedGradient(torch.autograd.Function):
    """Outputs that would have a gradient in torch; a backward through them raises an error."""

    @staticmethod
    def forward(ctx: Any, words: str, anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.words = words
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(ctx.words)


class BufferUpdates:
    """The buffer updates of one compiled step. written: index of an output -> buffer or parameter that it is written
    into. bound: buffers that are replaced by other tensors.

    reads: slots that the backward reads. tangents: names of the outputs that are differentiated.
    """

    def __init__(self, compiled: Compiled, reads: Sequence[int], tangents: set[str]) -> None:
        signature = compiled.signature
        new = [(i, spec) for i, spec in enumerate(signature.outputs) if spec.kind == "mutation"]
        self.written = {i: spec.name for i, spec in new if not spec.assigned}
        self.bound: dict[str, Assignment] = {a.name: a for a in signature.assigned}
        self._places = {spec.name: i for i, spec in new if spec.assigned}
        self._in_parameters = not {p.name for p in compiled.parameters}.isdisjoint(self.written.values())
        self._unkept = signature.unkept
        self._keeps_dtypes = bool(compiled.plan.options.precision.compute)
        dependent = {output_place(name) for part in compiled.pipeline.parts for name in part.dependent}
        aliases = ((i, spec.alias) for i, spec in enumerate(signature.outputs) if i not in dependent)
        self._aliases = {i: place for i, place in aliases if place is not None}
        self._copied = {i for part in compiled.pipeline.parts for i in self._shared(part)} if new else set[int]()
        self._reads, self._in_written = reads, list[int]() if not self.written else None
        self._again: list[str] = []
        whole = compiled.train and len(compiled.pipeline.parts) == 1
        if self.written and whole and not tangents.issuperset(compiled.stage.dependent):
            self._again = _that_outputs_depend_on(compiled, set(self.written.values()))

    def _shared(self, part: Stage) -> list[int]:
        """Indices of values in memory that others hold or that is about to be written to."""
        names = part.forward.outputs
        place = {names.index(output(i)): i for i in (*self.written, *self._places.values()) if output(i) in names}
        if not place:
            return []
        gm = part.forward.unnamed
        given = {i for name, i in self._places.items() if self.bound[name].given}
        found = shared_outputs(gm, [k for k, i in place.items() if i not in self.written and i not in given])
        behind, nodes = storages(gm), outputs(gm)
        found += [k for k, i in place.items() if i in self.written and behind[nodes[k]][0][0].op == "placeholder"]
        return [place[k] for k in found]

    def keep(self, slots: list[Any], values: Mapping[str, Tensor], shared: Collection[str]) -> dict[str, Tensor]:
        """After a forward: copy slots that the backward reads if their memory is about to be written to, or belongs to
        ``shared`` buffers, which user code may write to. Returns copies of the buffers needed to run the forward
        again."""
        shared = [name for name in shared if name in values]
        if not self.written and not shared:
            return {}
        apart = _Apart()
        if self._in_written is None or shared:
            memories = {_memory(values[name]) for name in (*self.written.values(), *shared)}
            held = ((i, slots[i]) for i in self._reads)
            self._in_written = [i for i, x in held if isinstance(x, Tensor) and x.numel() and _memory(x) in memories]
        for i in self._in_written:
            slots[i] = apart.copy(slots[i])
        return {name: apart.copy(values[name]) for name in (*self._again, *shared)}

    def store(self, tree: ShardedModules, made: list[Any], differentiated: bool) -> None:
        """Update the buffers of the modules. ``made``: the outputs of the step; those that alias a buffer are replaced
        by views of it. ``differentiated``: the forward was recorded by autograd."""
        if self._unkept:
            tree.leave_out(self._unkept)
        if self.written or self.bound or self._aliases:
            self._store(tree, made, differentiated)

    @torch.no_grad()
    def _store(self, tree: ShardedModules, made: list[Any], differentiated: bool) -> None:
        before = tree.buffers()
        targets = dict(before)
        if self._in_parameters:  # of which other stages may hold some
            targets |= {name: x for name, x in tree.pieces().items() if name in tree.here}
        values = {i: made[i].clone() if i in self._copied else made[i] for i in (*self.written, *self._places.values())}
        here = [(targets[name], values[i]) for i, name in self.written.items() if name in targets]
        copy_all([target for target, _ in here], [value for _, value in here])
        after: dict[str, Tensor | None] = {}
        for name, assigned in self.bound.items():
            if assigned.alias is not None:
                after[name] = _placed(assigned.alias, before, after)
            elif assigned.value:
                value = values[self._places[name]]
                if self._keeps_dtypes and name in before and value.is_floating_point():
                    value = value.to(before[name].dtype)
                after[name] = _with_graph(name, value) if assigned.differentiable and differentiated else value
            else:
                after[name] = None
        for name, tensor in after.items():
            tree.bind(name, tensor)
        for i, alias in self._aliases.items():
            found = _placed(alias, before, after)
            if isinstance(made[i], Tensor) and found.shape == made[i].shape:
                made[i] = found if alias.view is None and not found.requires_grad else found.detach()


def plain_buffers(tree: ShardedModules, compiled: Compiled, train: bool) -> dict[str, Tensor]:
    """The buffers as plain tensors. Raises ValueError for a buffer through which a gradient would leave the step."""
    found = tree.buffers()
    wanting = [name for name, x in found.items() if x.requires_grad]
    if not wanting:
        return found
    read = [name for name in wanting if name in compiled.signature.differentiated]
    if read and train and torch.is_grad_enabled():
        raise ValueError(
            f"buffers: the forward reads buffer {read[0]}, which requires grad, but steps compute gradients of "
            "parameters only, not of a buffer or of an earlier forward; assign it detached (self.x = h.detach()), or "
            "make it a parameter"
        )
    return found | {name: found[name].detach() for name in wanting}


def _with_graph(name: str, value: Tensor) -> Tensor:
    words = (
        f"buffers: {name} was assigned a value with its autograd graph, which compiled steps do not have; return it as "
        "an output, too, and use that"
    )
    return with_refusal(words, [value], value.device)[0]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _placed(alias: BufferAlias, before: Mapping[str, Tensor], after: Mapping[str, Tensor | None]) -> Tensor:
    base = (after if alias.new else before)[alias.buffer]
    assert base is not None
    if alias.view is None:
        return base
    sizes, strides, start = alias.view
    return base.detach().as_strided(sizes, strides, base.storage_offset() + start)


class _Apart:
    """Copies of tensors with the same strides; tensors that share memory have copies that share memory."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def copy(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if (copied := self._made.get(storage.data_ptr())) is None:
            copied = self._made[storage.data_ptr()] = storage.clone()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(copied, x.storage_offset(), x.size(), x.stride())


def _that_outputs_depend_on(compiled: Compiled, names: set[str]) -> list[str]:
    forward = compiled.stage.forward
    kinds = [spec.kind for spec in compiled.signature.outputs]
    made = zip(forward.outputs, outputs(forward.graph), strict=True)
    results = [x for name, x in made if is_a(name, "output") and kinds[output_place(name)] == "output"]
    reached = ancestors(results)
    read = {name for name, node in zip(forward.inputs, placeholders(forward.graph), strict=True) if node in reached}
    taken = set(forward.inputs)
    nodes = {spec.name: spec.node for spec in compiled.signature.inputs if spec.kind in ("buffer", "parameter")}
    return [name for name in sorted(names) if (node := nodes.get(name)) in read or (node and node not in taken)]
