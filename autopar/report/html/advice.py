"""What to try next, from the numbers of a compiled step: (what was found, what to try), the largest first."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.axis_shares import repeated
from autopar.cost.memory import Memory
from autopar.cost.module_costs import ModuleCost
from autopar.cost.step_estimate import StepEstimate
from autopar.plan import Plan
from autopar.report.formatting import human_bytes, human_seconds

LATE, IDLE, LARGE = 0.15, 0.1, 0.4  # of the step's time, of it without work, of the memory at the peak: worth a line
_FASTER = {
    "tp": "keep tp within the ranks of a node, or take a smaller tp and more dp; longer batches hide more",
    "dp": "more examples per rank; with zero below 3 a step gathers once, whatever its microbatches",
    "ep": "token_dispatcher= by name, see autopar experts; keep ep within a node",
    "cp": "attention= by name, see autopar attention; cp pays for long sequences only",
    "pp": "more microbatches, so that sending stands beside computing",
}


def advice(plan: Plan, cost: ModuleCost, step: StepEstimate, memory: Memory) -> list[tuple[str, str]]:
    """cost: of the whole model. memory: of the fullest rank."""
    rows = [*_late(cost, step), *_idle(plan, step), *_full(plan, memory)]
    return [*((found, way_out) for text in repeated(plan) for found, way_out in [_cut(text)]), *rows]


def _cut(text: str) -> tuple[str, str]:
    found, _, way_out = text.removeprefix("plan: ").rpartition("; ")
    return found, way_out


def _late(cost: ModuleCost, step: StepEstimate) -> Iterator[tuple[str, str]]:
    """What computing waits for, by axis."""
    axes: dict[str, float] = {}
    for (axis, _, _), x in cost.exchanged.items():
        name = axis.partition(",")[0].partition("%")[0].partition("/")[0]
        axes[name] = axes.get(name, 0.0) + x.exposed
    for axis, seconds in sorted(axes.items(), key=lambda item: -item[1]):
        if seconds > LATE * step.seconds:
            share = f"{min(seconds / step.seconds, 1):.0%} of the step"
            yield f"computing waits {human_seconds(seconds)} for transfers over {axis}, {share}", _FASTER.get(axis, "")


def _idle(plan: Plan, step: StepEstimate) -> Iterator[tuple[str, str]]:
    """Time of a pipeline in which a rank has nothing to do."""
    idle = 1 - (step.computing + step.exposed) / step.seconds if step.seconds else 0.0
    if plan.pipeline is not None and idle > IDLE:
        more = f"microbatches above {plan.options.microbatches}, or a schedule with a smaller bubble"
        found = f"ranks of the pipeline have no work for {idle:.0%} of the step"
        yield found, f"{more}: autopar schedule --name all"


def _full(plan: Plan, memory: Memory) -> Iterator[tuple[str, str]]:
    options, dp = plan.options, plan.mesh.data_size
    kept = min(memory.saved, memory.peak - memory.steady)
    if kept > LARGE * memory.peak:
        found = f"{human_bytes(kept)} of {human_bytes(memory.peak)} are activations kept for the backward"
        yield (
            found,
            'activation_checkpoint="selective" or "full", or memory_limit="40GB", which recomputes what it must; '
            + (
                "more microbatches"
                if plan.mesh.size("tp") == 1 or options.sequence_parallel
                else "sequence_parallel=True"
            ),
        )
    states = memory.optimizer if not memory.states else 0
    if dp > 1 and not options.zero and states + memory.parameters > LARGE * memory.peak:
        found = f"{human_bytes(states + memory.parameters)} of {human_bytes(memory.peak)} are weights and states of the"
        yield f"{found} optimizer, whole on each of {dp} ranks", "zero=1, which stores a piece on each; or zero=3"
