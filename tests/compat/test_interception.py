"""What runs in a forward is what was captured: the backward of a graph is held against that of an eager forward."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from autopar.capture.front_end import capture
from autopar.ir.exported import refuse_other_gradients
from autopar.ir.mesh import Mesh
from autopar.ir.meta import signature_of
from autopar.testing.harness import check_model
from tests.compat.habit_interception import Clipped, clip

BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()}


class Body(nn.Module):
    """``body(self, x)`` is the loss, or all that is returned."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Block(nn.Module):
    """Clips, in the way of one of its layers; the other one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            more = self.b(x)
        return clip(torch.tanh(self.a(x))) + more, more.sum()


class Blocks(nn.Module):
    """Alike: most are copies of one that was traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_an_apply_by_another_name_in_alike_blocks(mesh: str) -> None:
    assert check_model(Blocks().double(), BATCH, Mesh.parse(mesh)).worst < 1e-12


def test_other_gradients_are_refused_by_the_names_of_the_parameters() -> None:
    gm = capture(Body(lambda m, x: (m.a(x).sum(), m.b(x).sum().detach())), BATCH)
    first = frozenset({"a.weight", "a.bias"})
    refuse_other_gradients(gm, [first, frozenset()])
    refuse_other_gradients(gm, [None, None])
    with pytest.raises(ValueError, match=r"the backward of 0 reaches a.bias in the captured graph, and does not in"):
        refuse_other_gradients(gm, [first - {"a.bias"}, frozenset()])
    with pytest.raises(ValueError, match=r"backward of 1 does not reach a.bias, a.weight in "):
        refuse_other_gradients(gm, [first, first])


def test_results_of_one_operator_have_paths_of_their_own() -> None:
    gm = capture(Body(lambda m, x: list(torch.broadcast_tensors(m.a(x), m.b(x)))), BATCH)
    assert [spec.name for spec in signature_of(gm).outputs] == ["0", "1"]
    capture(Body(lambda m, x: torch.autograd.grad(m.a(x).sin().sum(), m.a.weight, create_graph=True)[0].sum()), BATCH)


def test_a_scripted_function_that_differentiates_itself_is_refused() -> None:
    function = torch.jit.script(_doubled)
    assert capture(Body(lambda m, x: function(m.a(x)).sum()), BATCH)
    for _ in range(3):
        function(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match=r"a torch.jit function in the forward was called before"):
        capture(Body(lambda m, x: (m.a(x) + function(m.a(x))).sum()), BATCH)


def _doubled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def test_other_threads_and_later_calls_are_left_alone() -> None:
    found: list[Tensor] = []

    def differentiated() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.inference_mode():
            assert torch.is_inference_mode_enabled()
        clip(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad)

    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and differentiated())
    thread.start()

    def body(m: Any, x: Tensor) -> Tensor:
        go.set()
        thread.join()
        return m.a(x).sum()

    before = [vars(cls)["__enter__"] for cls in (torch.inference_mode, torch.autograd.graph.saved_tensors_hooks)]
    codes = torch.compiler.is_compiling.__code__, torch.is_grad_enabled
    capture(Body(body), BATCH)
    assert torch.equal(found[0], torch.full((2,), 1e-3))
    assert "apply" not in vars(Function.__mro__[1]) and Clipped.apply == clip
    assert (torch.compiler.is_compiling.__code__, torch.is_grad_enabled) == codes
    assert before == [vars(c)["__enter__"] for c in (torch.inference_mode, torch.autograd.graph.saved_tensors_hooks)]


@pytest.mark.parametrize("grad_mode", ["grad", "no_grad"])
def test_what_a_forward_is_told_of_the_grad_mode(grad_mode: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return (m.a if torch.is_grad_enabled() else m.b)(x).sum()

    gm = capture(Body(body), BATCH, grad_mode=grad_mode)
    (bias,) = (n.name for n in gm.graph.nodes if n.op == "placeholder" and n.name.endswith("bias") and n.users)
    assert signature_of(gm).asks_grad_mode and bias == ("p_a_bias" if grad_mode == "grad" else "p_b_bias")
    assert not signature_of(capture(Body(lambda m, x: m.a(x).sum()), BATCH)).asks_grad_mode


def test_what_is_unusual_is_told_with_a_way_to_check_it() -> None:
    def counts(m: Any, x: Tensor) -> Tensor:
        m.count = getattr(m, "count", 0) + 1
        return m.a(x).sum()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        capture(Body(counts), BATCH)
    (text,) = (str(w.message) for w in told if "capture" in str(w.message))
    assert text.endswith("; autopar.verify(model, mesh, batch) compares a step on the first batch with one process")
