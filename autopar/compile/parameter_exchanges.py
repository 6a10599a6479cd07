"""Where the exchanges of parameters and gradients stand: in graphs of their own (G, R), or within F and the backwards.

    zero    gathers          sums over ranks
    0                        the last backward (with stages: R)
    1       the first F      the last backward (with stages: R)
    2       the first F      every backward
    3       every graph      every backward

What every backward sums is what sums cut: over dp (and cp) it leaves pieces. What they leave whole is summed once per
step, as with 0 and 1, in the last backward or in R: pieces over replicas (dp_replicate), which moves 2(R-1)/R of a
piece (Zhao et al. 2023, PyTorch FSDP, 3.2.2), and gradients of parameters that nothing cuts (vectors) over all axes.

Before this a part has G and R, where what is between stored and used parameters was cut out of it; else all of it is in
F and in the backward already, which makes it again: then only its sums are taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from autopar.passes.stage.accumulate_gradients import split_accumulation
from autopar.passes.stage.parameter_graphs import (
    inline_gathers,
    inline_reductions,
    late_reduce_graph,
    reduce_graph,
    with_gathers,
)
from autopar.plan import Plan
from autopar.precision import Precision
from autopar.steps.graphs import Stage
from autopar.steps.value_names import grad

OF_EACH = ("backward", "backward_input", "backward_weight")  # the backwards of every microbatch


def place_exchanges(stage: Stage, used: Mapping[Node, Node] | None, plan: Plan) -> None:
    """``used``: used node -> its parameter, where G and R were cut out."""
    options, alone = plan.options, plan.pipeline is None  # without other parts it is known which backward is the last
    last = alone and stage.backward is not None
    once = options.reduces_once and options.microbatches > 1
    late = options.microbatches > 1 and not once
    if used is not None:
        if not options.gathers_once and stage.gather is not None:
            _gather_inside(stage)
        if not once:
            _reduce_in_each(stage, used, options.precision, late)
        if last and stage.reduce is not None:
            _reduce_in_last(stage)
        if alone:
            stage.roots = _of_stored(stage.roots, used)
    elif last and (once or late):
        assert stage.backward is not None
        stage.backward, stage.backward_reduce = split_accumulation(stage.backward, options.precision, late)
    if last and options.microbatches == 1:
        stage.backward, stage.backward_reduce = None, stage.backward
    if stage.gather is not None:
        stage.gather_forward = with_gathers(stage.forward, stage.gather)


def _gather_inside(stage: Stage) -> None:
    """Parameters are gathered by every graph that uses them, and die in between."""
    gather = stage.gather
    assert gather is not None
    for name in ("forward", *OF_EACH):
        step = getattr(stage, name)
        setattr(stage, name, step and inline_gathers(step, gather))
    stage.gather, stage.gathered = None, {}


def _reduce_in_last(stage: Stage) -> None:
    """Sums overlap with the last backward, which takes what the earlier ones have made."""
    assert stage.backward is not None and stage.reduce is not None
    stage.backward_reduce, stage.reduce = inline_reductions(stage.backward, stage.reduce, last=True), None


def _reduce_in_each(stage: Stage, used: Mapping[Node, Node], precision: Precision, late: bool) -> None:
    """Where several graphs make gradients of one parameter, each sums its own."""
    made: dict[str | None, None] = {}
    for name in OF_EACH:
        step = getattr(stage, name)
        reduce = reduce_graph(used, step.outputs, precision, False, late) if step is not None else None
        if reduce is not None:
            setattr(stage, name, inline_reductions(step, reduce))
            made |= dict.fromkeys(reduce.outputs)
    stage.reduce = late_reduce_graph(used, made, precision) if late else None


def _of_stored(roots: Mapping[str, list[str]], used: Mapping[Node, Node]) -> dict[str, list[str]]:
    """`Stage.roots` of stored parameters, from those of their used values."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(p.name for p in used.values()):
        each = [roots.get(grad(u.name)) for u, p in used.items() if p.name == name]
        if None not in each:  # else all
            found[grad(name)] = list(dict.fromkeys(start for starts in each for start in starts or ()))
    return found
