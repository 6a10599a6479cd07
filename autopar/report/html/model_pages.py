"""What the report says of the model, before it speaks of the compiler: step time, modules, one layer, memory."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.memory import Memory, memories
from autopar.cost.step_estimate import StepEstimate, step_estimate, times_of_graphs
from autopar.report.formatting import human_bytes, human_seconds
from autopar.report.html.advice import advice
from autopar.report.html.layer_picture import layer_picture
from autopar.report.html.model_section import memory_bar, model_section
from autopar.report.html.page import Section, findings
from autopar.report.model_tree import model_tree
from autopar.steps.graphs import Compiled


@dataclass(frozen=True)
class ModelPages:
    """Sections, and (what, value) pairs for the summary."""

    sections: list[Section]
    facts: list[tuple[str, str]]


def model_sections(compiled: Compiled) -> ModelPages:
    """Of a compiled model, on any mesh."""
    times = times_of_graphs(compiled)
    root, estimate = model_tree(compiled, times), step_estimate(compiled, times)
    held = memories(compiled)
    fullest = max(held, key=lambda m: m.peak)
    tried = advice(compiled.plan, root.total, estimate, fullest)
    sections = [Section("What to try", findings(tried))] if tried else []
    sections.append(model_section(root, _basis(estimate, compiled)))
    if picture := layer_picture(root, compiled, times):
        sections.append(Section("One layer", picture))
    where = f" of the fullest rank, {held.index(fullest)} of pp" if len(held) > 1 else " of a rank"
    sections.append(Section("Memory", memory_bar(memory_causes(fullest), f"At the peak of a step,{where}")))
    return ModelPages(sections, [*facts_of_step(estimate), ("memory of a rank, peak", human_bytes(fullest.peak))])


def facts_of_step(found: StepEstimate) -> list[tuple[str, str]]:
    """What a step comes to, for the summary."""
    return [
        (f"a step, estimated for {found.device}", human_seconds(found.seconds)),
        ("of it in wait for transfers", human_seconds(found.exposed)),
        ("MFU at that", f"{found.utilization:.1%}"),
    ]


def _basis(found: StepEstimate, compiled: Compiled) -> str:
    pp = compiled.plan.mesh.size("pp")
    ranks = ", on the ranks that have it" if pp > 1 else ""
    return (
        f"Of a whole step on one rank{ranks}. Times are estimated for {found.device}, over links {found.links}; "
        "point at a number for its parts."
    )


def memory_causes(found: Memory) -> list[tuple[str, int]]:
    """(cause, bytes) of what is held at the peak. What is live then but neither steady nor kept by F is one cause: how
    it divides into gradients and working values depends on the moment."""
    kept = min(found.saved, found.peak - found.steady)
    optimizer = found.optimizer if not found.states else 0
    return [
        ("weights", found.parameters),
        ("optimizer states", optimizer),
        ("buffers and batch", found.buffers + found.inputs),
        ("activations kept for the backward", kept),
        ("gradients, sums and working values", found.peak - found.steady - kept),
    ]
