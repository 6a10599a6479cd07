"""accumulate_gradients: backwards add to the gradients of earlier microbatches, and reduce once per step.

Consumes    a backward step graph whose gradients end in reductions over ranks.
Guarantees  two graphs, which take the gradients accumulated so far as further inputs (``earlier_w``, ...) and add each
            where it is computed, so that no second set of gradients is alive (PyTorch's AccumulateGrad does the same).
            BW stops before the reductions and returns this rank's unreduced sums. BWR, the last of a step, reduces.
Leaves      reductions of activations, which every microbatch needs; reductions that several gradients share (those of
            ``w1 + w2.t()``), which every microbatch runs as well.

    g = mm(dy, x); r = all_reduce(g, "dp"); return r
        -->
    BW:   return add(mm(dy, x), earlier_w)    (`autopar.passes.step.fuse_accumulation` makes one call of it)
    BWR:  g = add(mm(dy, x), earlier_w); r = all_reduce(g, "dp"); return r
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.ir.compute_dtypes import added_in
from autopar.ir.graph import (
    add_placeholder,
    copy_graph,
    insert_call,
    is_call,
    output_node,
    outputs,
    placeholders,
    remove_dead_code,
)
from autopar.passes.autodiff.clone_aliased_grads import clone_aliased_grads
from autopar.passes.autodiff.widen_reductions import CAST, behind_sums
from autopar.precision import Precision
from autopar.steps.graphs import StepGraph, earlier_sum, of

aten = torch.ops.aten


def split_accumulation(backward: StepGraph, precision: Precision, whole: bool = False) -> tuple[StepGraph, StepGraph]:
    """(BW, which `accumulating` completes, BWR): see the module's docstring. ``whole``: reductions that shard a
    gradient stay in every microbatch; only those after them, and those of unsharded gradients, move to the last one.
    The graph is not changed."""
    own = StepGraph(_local(copy_graph(backward.graph), whole), backward.inputs, backward.outputs)
    last = _last(copy_graph(backward.graph), backward.outputs, precision, whole)
    sums = [earlier_sum(of(name)) for name in backward.outputs if name is not None]
    return own, StepGraph(last, [*backward.inputs, *sums], backward.outputs)


def accumulating(step: StepGraph, dtypes: Mapping[str, torch.dtype], several: bool) -> StepGraph:
    """A backward that returns the sums of its gradients and those of earlier microbatches, if there are ``several``.
    ``dtypes``: gradient -> that of the sum; other results are left. The graph is not changed."""
    if dtypes.keys().isdisjoint(step.outputs):
        return step
    gm = copy_graph(step.graph)
    end, results, inputs = output_node(gm), list(outputs(gm)), list(step.inputs)
    named = {i: name for i, name in enumerate(step.outputs) if name is not None and isinstance(results[i], Node)}
    made = {i: name for i, name in named.items() if name in dtypes}
    if several:
        totals = add_earlier(gm, [(name, results[i], dtypes[name]) for i, name in made.items()])
        inputs += [earlier_sum(of(name)) for name in made.values()]
    else:
        totals = [_cast(end, results[i], dtypes[name]) for i, name in made.items()]
    for i, total in zip(made, totals, strict=True):
        results[i] = total
    end.args = (tuple(results),)
    gm.meta["owned"] = sorted({*made, *gm.meta.get("owned", ())})
    gm.recompile()
    return StepGraph(gm, inputs, step.outputs)


def _cast(before: Node, x: Node, dtype: torch.dtype) -> Node:
    if x.meta["val"].dtype == dtype:
        return x
    made: Node = insert_call(before, CAST, (x,), {"dtype": dtype}, like=x, val=x.meta["val"].to(dtype))
    return made


def add_earlier(gm: GraphModule, gradients: Iterable[tuple[str, Node, torch.dtype]]) -> list[Node]:
    """Gradients plus the sums of earlier microbatches, which are further inputs. Each: its name, this microbatch's,
    and the dtype of the sum."""
    after, totals = placeholders(gm)[-1], list[Node]()
    for name, own, dtype in gradients:
        val = own.meta["val"]
        after = add_placeholder(gm.graph, f"earlier_{of(name)}", after)
        sum_val = val.new_empty(val.shape, dtype=dtype)  # sums are contiguous
        after.meta |= {"val": sum_val, "has_gradient": False, "donated": True}
        totals.append(insert_call(own.next, aten.add.Tensor, (own, after), like=own, val=val.to(dtype)))
    return totals


def _local(gm: GraphModule, whole: bool) -> GraphModule:
    out = output_node(gm)
    out.args = (tuple(behind_sums(g, whole)[0] if isinstance(g, Node) else None for g in outputs(gm)),)
    remove_dead_code(gm)
    clone_aliased_grads(gm)
    return gm


def _last(gm: GraphModule, names: Sequence[str | None], precision: Precision, whole: bool) -> GraphModule:
    out = output_node(gm)
    gradients = list(out.args[0])  # type: ignore[arg-type]
    behind = {i: behind_sums(x, whole) for i, x in enumerate(gradients) if isinstance(x, Node)}
    added = [
        (name, own, added_in(own.meta["val"].dtype, gradients[i].meta["val"].dtype, precision))
        for i, (own, _) in behind.items()
        if (name := names[i]) is not None
    ]
    for (i, (own, chain)), total in zip(behind.items(), add_earlier(gm, added), strict=True):
        gradients[i] = _instead(own, chain, total)
    out.args = (tuple(gradients),)
    gm.recompile()
    return gm


def _instead(own: Node, chain: list[Node], total: Node) -> Node:
    """Repeat ``chain`` on the sum with the earlier gradients instead of on ``own``."""
    dtype = total.meta["val"].dtype
    if chain and is_call(chain[0], CAST) and chain[0].meta["val"].dtype == dtype:
        first, *chain = chain
        if chain:
            chain[0].update_arg(0, total)
            total.graph.erase_node(first)
    elif chain and not is_call(chain[0], CAST) and dtype != own.meta["val"].dtype:
        how, val = {"dtype": own.meta["val"].dtype}, own.meta["val"]
        chain[0].update_arg(0, insert_call(total.next, CAST, (total,), how, like=own, val=val))
    elif chain:
        chain[0].update_arg(0, total)
    return chain[-1] if chain else total
