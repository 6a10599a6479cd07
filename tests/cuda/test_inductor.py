"""What Inductor is given on a machine with GPUs: every value of a step graph is on this rank's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph, outputs, placeholders, set_device
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups
from tests.cuda.fake_gpu import ROUTES, fake_gpu
from tests.cuda.loops import in_type
from tests.support.subjects import tiny


def given_to_inductor(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphModule, list[Any]]]:
    """(graph, inputs) of every compilation. What comes then runs on GPUs only: Inductor traces its patterns on one, and
    makes code with Triton."""
    found: list[tuple[GraphModule, list[Any]]] = []
    monkeypatch.setattr("autopar.adapters.inductor.joint_graph_passes", lambda gm: None)
    for method, route in ROUTES.items():  # torch's decompositions call them where no function mode is asked
        monkeypatch.setattr(Tensor, method.__name__, route)
    monkeypatch.setattr("autopar.adapters.inductor.compile_fx_inner", lambda gm, inputs: found.append((gm, inputs)))
    return found


def devices(value: Any) -> set[torch.device]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return {x.device for x in values if isinstance(x, Tensor)}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("mixtral", marks=pytest.mark.full)])
def test_all_of_a_step_is_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = in_type(*tiny(name, 1, dropout=0.1), torch.bfloat16)
    compiled = compile_graph(copy_graph(capture(model, batch)), Mesh.parse("tp=2"), Options(), outputs=())
    found = given_to_inductor(monkeypatch)
    with fake_gpu(world=2):
        groups = Groups(autopar.init_mesh("cuda", tp=2))
        for step in (s for part in compiled.pipeline.parts for s in (part.forward, part.backward_reduce) if s):
            set_device(step.graph, groups.device)
            bind(step.graph, groups, "inductor")
    assert len(found) == 2
    for gm, inputs in found:
        on = [devices(inputs), *(devices(node.meta.get("val")) for node in gm.graph.nodes)]
        assert set().union(*on) == {torch.device("cuda", 0)}


def test_what_a_graph_returns_is_what_the_next_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the statistics of a layer norm in bfloat16 are bfloat16, which is what the captured graph says; on a
    GPU they are float32. Code made for bfloat16 would read half of them, as other numbers."""
    model, batch = in_type(*tiny("gpt2", 1), torch.bfloat16)
    compiled = compile_graph(copy_graph(capture(model, batch)), Mesh.parse("dp=1"), Options(), outputs=())
    found = given_to_inductor(monkeypatch)
    with fake_gpu(world=1):
        Executor(compiled, Groups(autopar.init_mesh("cuda", dp=1)), "inductor")
    (forward, _), (backward, taken) = found
    part = compiled.pipeline.parts[0]
    assert part.backward_reduce is not None
    made = {name: node.meta["val"] for name, node in zip(part.forward.outputs, outputs(forward)) if name}
    told = dict(zip(part.backward_reduce.inputs, taken, strict=True))
    shared = {name: (made[name], told[name]) for name in made.keys() & told.keys()}
    facts = {name: [(x.dtype, x.stride()) for x in both] for name, both in shared.items()}
    assert all(a == b for a, b in facts.values()), facts
    captured = [n.meta["val"].dtype for n in placeholders(part.backward_reduce.graph)]
    differ = [a for a, x in zip(captured, taken, strict=True) if a != x.dtype]
    norms = 2 * model.config.n_layer + 1
    assert differ == [torch.bfloat16] * 2 * norms  # mean and reciprocal deviation
    assert len(shared) > 10 and backward is not forward
