"""Faults in what is made of a placed graph: derivatives, buckets, accumulation; and in losses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import autopar.compile.stages
import autopar.ir.conversions
import autopar.passes.canonicalize.losses as losses
import autopar.passes.canonicalize.normalize as normalize
import autopar.passes.stage.accumulate_gradients as accumulation
from autopar.ir.graph import insert_call, output_node, outputs, remove_dead_code
from autopar.passes.autodiff.joint import Joint
from autopar.steps.graphs import StepGraph
from tests.faulty.planted import (
    calls,
    set_outputs,
    skip,
)
from tests.faulty.planted_table import in_code, in_step, patched

aten, ours = torch.ops.aten, torch.ops.autopar


# --- differentiation ----------------------------------------------------------------------------------------


def _joint(change: Callable[[Joint], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mistake in what the joint graph says."""
    made = Joint.__init__

    def init(self: Joint, *args: Any) -> None:
        made(self, *args)
        if self.gradients:
            change(self)

    return patched(Joint, "__init__", init)


def _swap(first: str, second: str) -> Callable[[Joint], None]:
    def change(joint: Joint) -> None:
        a, b = (next(n for n in joint.gradients if n.endswith(x)) for x in (first, second))
        joint.gradients[a], joint.gradients[b] = joint.gradients[b], joint.gradients[a]

    return change


def _rounded(joint: Joint) -> None:
    name = next(n for n in joint.gradients if n.endswith("head_weight"))
    g = joint.gradients[name]
    assert g is not None
    new = insert_call(g.next, aten._to_copy.default, (g,), {"dtype": torch.float32}, like=g)
    joint.gradients[name] = joint.dependent[new] = new


def _forgotten(joint: Joint) -> None:
    joint.gradients[next(n for n in joint.gradients if n.endswith("norm_bias"))] = None


def _wrong_value(gm: GraphModule) -> None:
    """What is saved for the backward of tanh is its operand."""
    node = calls(gm, aten.tanh.default)[0]
    set_outputs(gm, lambda values: [node.args[0] if v is node else v for v in values])


in_code(
    "differentiation",
    "gradients of two norms' weights are swapped",
    "numbers",
    "ddp",
    _joint(_swap("norm_weight", "norm_bias")),
)
in_code(
    "differentiation",
    "gradients of two products are swapped",
    "step checks",
    "ddp",
    _joint(_swap("up_weight", "down_weight")),
)
in_code("differentiation", "a gradient in lower precision", "step checks", "ddp", _joint(_rounded))
in_code("differentiation", "a gradient is dropped", "step checks", "ddp", _joint(_forgotten))
in_step(
    "differentiation",
    "the operand of tanh is saved instead of its result",
    "numbers",
    "ddp forward simplify",
    _wrong_value,
)


# --- passes of step graphs ----------------------------------------------------------------------------------


def _sums(gm: GraphModule) -> list[Node]:
    return calls(gm, ours.all_reduce.default)


def _largest_sum(gm: GraphModule) -> None:
    _sums(gm)[-1].update_arg(2, "max")


def _twice(gm: GraphModule) -> None:
    node = _sums(gm)[-1]
    again = insert_call(node.next, node.target, (node, *node.args[1:]), like=node)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _over_tp(gm: GraphModule) -> None:
    node = next(n for n in _sums(gm) if n.args[1] == "dp")
    node.update_arg(1, "tp")


def _parts(gm: GraphModule) -> list[Node]:
    (split,) = calls(gm, aten.split_with_sizes_copy.default)
    return sorted(split.users, key=lambda n: n.args[1])


def _like_parts(gm: GraphModule, same: bool) -> None:
    """Two members of a bucket are unpacked in each other's place."""
    parts = _parts(gm)
    a, b = next(
        (a, b) for a in parts for b in parts if a is not b and (a.meta["val"].shape == b.meta["val"].shape) == same
    )
    a.args, b.args = (a.args[0], b.args[1]), (b.args[0], a.args[1])
    a.meta["val"], b.meta["val"] = b.meta["val"], a.meta["val"]


def _dropped_member(gm: GraphModule) -> None:
    """A member's gradient leaves unsummed, beside the bucket."""
    part = _parts(gm)[0]
    (packed,) = [n for n in gm.graph.nodes if n.name.startswith("bucket") and n.target is aten.cat.default]
    own = packed.args[0][0]
    part.replace_all_uses_with(own)
    gm.graph.erase_node(part)


def _early(gm: GraphModule) -> None:
    """A gather of activations is moved with those of parameters."""
    node = calls(gm, ours.all_gather.default)[-1]
    next(n for n in gm.graph.nodes if n.op == "call_function").prepend(node)


def _gathered_twice(gm: GraphModule) -> None:
    node = calls(gm, ours.all_gather.default)[0]
    users = list(node.users)
    again = insert_call(node.next, node.target, node.args, like=node)
    end = insert_call(output_node(gm), aten.clone.default, (again,), like=node)
    assert users and end


def _own_part(gm: GraphModule) -> None:
    """This rank's rows of its own gradient in place of those of the sum."""
    calls(gm, ours.reduce_scatter.default)[-1].target = ours.shard_slice.default


def _returns_input(gm: GraphModule) -> None:
    given = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.meta["val"].dim() == 2)
    like = [i for i, v in enumerate(outputs(gm)) if v is not None and v.meta["val"].shape == given.meta["val"].shape]
    assert like
    old = outputs(gm)[like[0]]
    set_outputs(gm, lambda values: [given if v is old else v for v in values])


def _transposed(gm: GraphModule) -> None:
    """A gradient leaves as a view of another."""
    values = outputs(gm)
    i = next(i for i, v in enumerate(values) for w in values[:i] if v.meta["val"].shape == w.meta["val"].shape)
    j = next(j for j in range(i) if values[j].meta["val"].shape == values[i].meta["val"].shape)
    set_outputs(gm, lambda v: [*v[:i], v[j], *v[i + 1 :]])
    remove_dead_code(gm)


def _factor(gm: GraphModule) -> None:
    """A product with a constant is simplified away."""
    node = next(
        n for n in calls(gm, aten.mul.Tensor, aten.div.Tensor) if isinstance(n.args[1], float) and n.args[1] != 1
    )
    skip(node)


for _name, _stop, _where, _change in (
    ("a bucket takes the maximum", "step checks", "ddp backward_reduce bucket_gradients", _largest_sum),
    ("a bucket is reduced twice", "step checks", "ddp backward_reduce bucket_gradients", _twice),
    ("a bucket of dp is reduced over tp", "step checks", "both backward_reduce bucket_gradients", _over_tp),
    (
        "gradients of one shape are swapped",
        "numbers",
        "ddp backward_reduce bucket_gradients",
        lambda g: _like_parts(g, True),
    ),
    ("a gradient leaves its bucket unreduced", "step checks", "ddp backward_reduce bucket_gradients", _dropped_member),
    ("a bucket is not reduced", "step checks", "ddp backward_reduce bucket_gradients", lambda g: skip(_sums(g)[-1])),
    ("a bucket leaves a gather over", "step checks", "zero backward_reduce bucket_gathers", _gathered_twice),
    ("a gradient is sliced, not scattered", "step checks", "zero backward_reduce bucket_gathers", _own_part),
):
    in_step("buckets", _name, _stop, _where, _change)
for _name, _stop, _where, _change in (
    ("a gather starts before its operand is computed", "step checks", "zero forward schedule_collectives", _early),
    ("a gradient is an input", "step checks", "ddp backward_reduce simplify", _returns_input),
    ("two gradients share storage", "step checks", "ddp backward_reduce clone_aliased_grads", _transposed),
    ("a factor is simplified away", "numbers", "ddp backward_reduce simplify", _factor),
):
    in_step("step passes", _name, _stop, _where, _change)


# --- accumulation -------------------------------------------------------------------------------------------

_split = accumulation.split_accumulation


def _last(change: Callable[[GraphModule], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mistake in the backward of the last microbatch."""

    def split(backward: StepGraph, *how: Any) -> tuple[StepGraph, StepGraph]:
        local, last = _split(backward, *how)
        change(last.graph)
        return local, last

    return patched(autopar.compile.stages, "split_accumulation", split)


def _earlier(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder" and n.name.startswith("earlier")]


def _not_added(gm: GraphModule) -> None:
    skip(next(iter(_earlier(gm)[0].users)))


def _added_behind(gm: GraphModule) -> None:
    """Sums of this rank are added to what is summed over the ranks."""
    given = _earlier(gm)[-1]
    (total,) = given.users
    own = total.args[0]
    (summed,) = total.users
    total.replace_all_uses_with(own)
    summed.append(total)
    summed.replace_all_uses_with(total)
    total.args = (summed, given)


def _reduced_each(planted: pytest.MonkeyPatch) -> None:
    """Every microbatch's gradients are summed over the ranks, and their sums again."""
    _local = accumulation._local

    def local(gm: GraphModule, over: Collection[str]) -> GraphModule:
        with planted.context() as inner:
            inner.setattr(accumulation, "behind_sums", lambda g, over: (g, []))
            return _local(gm, over)

    planted.setattr(accumulation, "_local", local)


for _name, _stop, _plant in (
    ("one gradient of earlier microbatches is lost", "step checks", _last(_not_added)),
    ("earlier gradients are added after the reduction", "step checks", _last(_added_behind)),
    ("gradients are summed in every microbatch, and again", "step checks", _reduced_each),
):
    in_code("accumulation", _name, _stop, "ddp", _plant)


# --- losses -------------------------------------------------------------------------------------------------

_cross_entropy, _finish = losses.cross_entropy_loss, losses._finish


def _all_count(node: Node, build: Any) -> Any:
    """The mean over all labels, those that do not count included."""
    found = _cross_entropy(node, build)
    quotient = found if found.target is aten.div.Tensor else found.args[0]
    quotient.update_arg(1, float(node.args[1].meta["val"].numel()))
    return found


def _hard(node: Node, build: Any) -> Any:
    found = _cross_entropy(node, build)
    for n in node.graph.nodes:
        if n.target is ours.cross_entropy.default:
            n.update_arg(3, 0.0)
    return found


def _summed_loss(node: Node, build: Any) -> Any:
    found = _cross_entropy(node, build)
    return found.args[0] if found.target is aten.div.Tensor else found.args[0].args[0]


for _name, _rewrite in (
    ("labels that do not count are counted", _all_count),
    ("label smoothing is dropped", _hard),
    ("a mean is a sum", _summed_loss),
):
    in_code(
        "losses", _name, "numbers", "ddp",
        lambda planted, r=_rewrite: planted.setitem(normalize.REWRITES, aten.cross_entropy_loss.default, r),
    )  # fmt: skip
