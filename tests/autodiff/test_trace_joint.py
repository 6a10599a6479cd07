"""The joint graph, put together from the derivatives of operators, is the one that AOTAutograd traces of the whole."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from autopar.adapters.copying.fake import new_mode
from autopar.capture.front_end import capture
from autopar.capture.trace import op_decomposition
from autopar.compile.model import compile_graph
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.passes.autodiff import joint, vjp
from autopar.passes.autodiff.trace_joint import joint_graph
from tests.support.subjects import tiny
from tests.support.whole_joint import whole_joint

aten = torch.ops.aten

SAME = (aten.detach.default, aten.alias.default)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    vjp.forget()
    yield
    vjp.forget()


def expressions(gm: GraphModule) -> list[Any]:
    """Every result as the tree of operators, arguments and facts of values that it is made by, hashed."""
    found: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found[node] = len(found)
        elif node.op == "call_function" and node.target in SAME:
            found[node] = found[node.args[0]]
        elif node.op == "call_function":
            parts = map_aggregate((node.args, node.kwargs), lambda x: found[x] if isinstance(x, Node) else repr(x))
            found[node] = hash((str(node.target), repr(parts), looks(node.meta["val"])))
    return [found.get(x) if isinstance(x, Node) else x for x in gm.graph.output_node().args[0]]


def looks(val: Any) -> Any:
    """Its facts. The stride of a dim of one is anything."""
    like = op_decomposition.like_of(val)
    if isinstance(like, tuple):
        return tuple(None if x is None else looks(x) for x in val)
    assert like is not None
    return like.shape, tuple(s for s, n in zip(like.stride, like.shape, strict=True) if n != 1), like.offset, like.dtype


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], list[Any]]]:
    """What each part compiled from now on has as joint graph, put together and traced whole."""
    found: list[tuple[list[Any], list[Any]]] = []

    def made(gm: GraphModule, wanted: Any) -> GraphModule:
        ours = joint_graph(gm, wanted)
        found.append((expressions(ours), expressions(whole_joint(gm, wanted))))
        return ours

    monkeypatch.setattr(joint, "joint_graph", made)
    spell_out(monkeypatch, aten.silu_backward.default)
    return found


def spell_out(monkeypatch: pytest.MonkeyPatch, *kept: Any) -> None:
    """AOTAutograd writes these as what they are made of; we call them."""
    dispatch = op_decomposition._CallList.__torch_dispatch__

    def spelled(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in kept:
            return dispatch(self, func, types, args, kwargs)
        with self:
            return func.decompose(*args, **(kwargs or {}))

    monkeypatch.setattr(op_decomposition._CallList, "__torch_dispatch__", spelled)


FEW = ("llama", "t5")
CELLS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {}),
    ("tp=2", {"sequence_parallel": True}),
    ("dp=2,tp=2", {"zero": 3, "microbatches": 2}),
    ("pp=2", {"microbatches": 4}),
    ("cp=2", {}),
]


def compare(model: nn.Module, batch: dict[str, Tensor], mesh: str, options: dict[str, Any], both: Any) -> None:
    compile_graph(capture(model, batch, lift_to_float64=True), Mesh.parse(mesh), Options(**options), outputs=())
    assert both
    for ours, whole in both:
        assert ours == whole


@pytest.mark.parametrize("name", FEW)
def test_it_is_that_of_the_whole(name: str, both: Any) -> None:
    compare(*tiny(name, layers=1), "dp=2,tp=2", {"zero": 3, "microbatches": 2}, both)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "options"), CELLS)
@pytest.mark.parametrize("name", [name for name in TINY if name != "bloom"])  # has a backward of its own
def test_it_is_that_of_the_whole_for_every_model(name: str, mesh: str, options: dict[str, Any], both: Any) -> None:
    compare(TINY[name].build(), TINY[name].batch(4, 16), mesh, options, both)


# --- corners of operators ------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], values: list[Tensor]) -> GraphModule:
    """A graph of one call, which may return a tuple."""
    graph, mode = torch.fx.Graph(), new_mode()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = mode.from_tensor(value)
    call = graph.call_function(function, tuple(nodes))
    out = function(*values)
    entries = [graph.call_function(operator.getitem, (call, i)) for i in range(len(out))]
    graph.output(tuple(entries))
    return GraphModule(nn.Module(), graph)


def numbers(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))) + 0.1


def index(*shape: int) -> Tensor:
    return torch.arange(3).expand(*shape, 3).clone() if shape else torch.arange(3)


x, y = numbers(4, 3), numbers(3, 4).t()
CORNERS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "the same operand twice": (lambda a: (a * a + a,), [x]),
    "an entry that nobody uses": (lambda a: a.topk(2, 1)[:1], [x]),
    "entries of views": (lambda a: (*a.split([1, 2], 1), a.unbind(0)[1].sum()), [x]),
    "an operand that comes back": (lambda a, b: (a, a.view(12), b.t()), [x, y]),
    "an expanded gradient": (lambda a: (a.sum(), a.mean(0, keepdim=True).expand(4, 3)), [x]),
    "strides": (lambda a, b: ((a @ b.t()).t().reshape(-1), torch.einsum("ij,ij->i", a, b)), [x, y]),
    "results without gradient": (lambda a: (a.argmax(1), a > 0.5, a.amax(1)), [x]),
    "operands without gradient": (lambda a, i: (a.gather(1, i), a[:, i[0]]), [x, index(4)]),
    "written in the derivative": (lambda a, b: (torch.clamp(a, b, b + 0.2), a.cumprod(0), a.prod()), [x, y]),
    "written in the operator": (lambda a, b: (a.index_add(0, index(), b[:3]), a.scatter(1, index(4), b)), [x, y]),
    "one dim": (lambda a, b: (torch.nn.functional.linear(a[0], b), a @ b[0], a[0] @ b.t(), a[0].dot(b[1])), [x, y]),
    "a vector": (lambda a, b: (torch.nn.functional.linear(a, b), b @ a), [numbers(3), y]),
    "numbers": (lambda a: (a * 2, a**2, a**2.0, a**0.5, a + True, 1 - a, a / 3), [x]),
    "complex": (lambda a, b: (torch.complex(a, b).abs(), torch.fft.rfft(a).real), [x, y]),
    "factors": (lambda a: torch.linalg.qr(a), [x]),
    "padding": (lambda a: (torch.nn.functional.pad(a, (1, 1)), a.roll(1, 0).flip(1), a.tril()), [x]),
    "norms": (lambda a, w: (torch.layer_norm(a, [3], w[0]), a.softmax(1), a.logsumexp(0), a.std(0)), [x, y]),
}


def gradients(results: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    live = [r for r in results if r.requires_grad]
    tangents = [torch.linspace(0, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in live]
    return list(torch.autograd.grad(live, leaves, tangents, allow_unused=True))


WANTED = [(c, w) for c, (_, v) in CORNERS.items() for w in ([0, 1], [1], [0])[: 3 if len(v) > 1 else 1]]


@pytest.mark.parametrize("corner, which", WANTED)
def test_corners_give_what_autograd_gives(corner: str, which: list[int]) -> None:
    """Where all operands, only the second or only the first have a gradient."""
    function, values = CORNERS[corner]
    wanted = [v.is_floating_point() and i in which for i, v in enumerate(values)]
    if not any(wanted):
        return test_corners_without_gradients(corner)
    leaves = [v.detach().clone().requires_grad_(w) for v, w in zip(values, wanted, strict=True)]
    results = function(*leaves)
    expected = iter(gradients(results, [v for v in leaves if v.requires_grad]))
    gm = joint_graph(graph_of(function, values), wanted)
    tangents = [torch.linspace(0, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in results if r.requires_grad]
    found = gm(*values, *tangents)
    torch.testing.assert_close(list(found[: len(results)]), [r.detach() for r in results], rtol=1e-13, atol=1e-13)
    for gradient, w in zip(found[len(results) :], wanted, strict=True):
        other = next(expected) if w else None
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("corner", CORNERS)
def test_corners_without_gradients(corner: str) -> None:
    function, values = CORNERS[corner]
    found = joint_graph(graph_of(function, values), [False for _ in values])(*values)
    torch.testing.assert_close(list(found), list(function(*values)), rtol=1e-13, atol=1e-13)


def test_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is recorded once for each way it is called; AOTAutograd traces what writes to its operands."""
    asked: list[str] = []
    for name in ("record", "_traced"):
        monkeypatch.setattr(*_noted(name, asked))
    for _ in range(2):
        joint_graph(graph_of(aten.sort.default, [x]), [True])
        joint_graph(graph_of(aten.unbind.int, [x]), [True])
    assert asked == ["record"] * 4
    joint_graph(graph_of(CORNERS["written in the derivative"][0], [x, y]), [True, True])
    assert asked[4:] == ["record", "record", "_traced"]


def _noted(name: str, asked: list[str]) -> tuple[Any, str, Any]:
    where: Any = vjp if name == "record" else op_decomposition
    original = getattr(where, name)
    return where, name, lambda *args: (asked.append(name), original(*args))[1]


FLAG = [1.0]


@torch.library.custom_op("autopar_test::flagged", mutates_args=())
def flagged(a: Tensor) -> list[Tensor]:
    return [a.clone()]


flagged.register_fake(lambda a: [torch.empty_like(a)])
flagged.register_autograd(lambda ctx, grads: grads[0] * FLAG[0])


def test_an_operator_of_a_library_may_read_its_flags() -> None:
    for flag in (2.0, 3.0):
        FLAG[0] = flag
        _, gradient = joint_graph(graph_of(torch.ops.autopar_test.flagged.default, [x]), [True])(x, torch.ones_like(x))
        assert gradient[0, 0] == flag


def test_numbers_of_two_types_are_two_keys() -> None:
    found = [joint_graph(graph_of(lambda a, p=p: (a**p,), [x]), [True]) for p in (2, 2.0, True)]  # type: ignore[misc]
    asked = [next(n.args[1] for n in gm.graph.nodes if n.target is aten.pow.Tensor_Scalar) for gm in found]
    assert [type(a) for a in asked] == [int, float, bool]


def test_values_are_of_the_graph() -> None:
    """Fakes of one mode, one for each value: what is remembered holds none."""
    for _ in range(2):
        gm = graph_of(*CORNERS["strides"])
        made = joint_graph(gm, [True, True])
        vals = [n.meta["val"] for n in made.graph.nodes if n.op != "output"]
        mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes)
        assert all(v.fake_mode is mode for v in vals) and len(set(map(id, vals))) == len(vals)


def test_dropouts_share_what_is_known_and_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(*_noted("record", asked))
    drop = torch.ops.autopar.dropout.default
    for site in (0, 5):
        graph, mode = torch.fx.Graph(), new_mode()
        nodes = [graph.placeholder("x"), graph.placeholder("seed")]
        for node, value in zip(nodes, (x, torch.tensor(1)), strict=True):
            node.meta["val"] = mode.from_tensor(value)
        graph.output((graph.call_function(drop, (*nodes, 0.5, site, [], [])),))
        made = joint_graph(GraphModule(nn.Module(), graph), [True, False])
        assert [n.args[3] for n in made.graph.nodes if n.target is drop] == [site, site]
    assert asked == ["record", "record"]
