"""What a rank keeps of a long sequence: 1/cp of it, in every value of the step graphs; counted and measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autopar.cost.memory import Memory, memory
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.runtime.exec.executor import Executor
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.support.cases import Cell, compiled, on_ranks, step_graphs, values_of
from tests.support.subjects import LONG, LONG_ROWS

HIDDEN, HEADS = TINY["llama"].sizes["hidden_size"], TINY["llama"].sizes["num_attention_heads"]


def cell_of(ranks: int, attention: str = "ring") -> Cell:
    return Cell("long llama", Mesh.of(cp=ranks), Options(attention=attention))


def of(ranks: int) -> Memory:
    return memory(compiled(cell_of(ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_are_divided_by_the_ranks(ranks: int) -> None:
    """What F keeps, and the most that lives in F and in B, of which gradients of parameters are not cut."""
    whole, cut = of(1), of(ranks)
    print(f"cp={ranks}: F keeps {cut.saved} of {whole.saved} bytes, {cut.saved / whole.saved:.4f}")
    assert cut.saved * ranks == pytest.approx(whole.saved, rel=0.01)
    assert cut.forward_peak * ranks == pytest.approx(whole.forward_peak, rel=0.02)
    in_backward = [m.backward_peak - m.gradients for m in (cut, whole)]
    assert in_backward[0] * ranks == pytest.approx(in_backward[1], rel=0.1)
    assert (cut.parameters, cut.inputs) == (whole.parameters, whole.inputs)


def floating(cell: Cell) -> Iterator[tuple[str, Tensor]]:
    """All floating values of the step graphs, by name."""
    for graph in step_graphs(compiled(cell)):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            for x in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(x, Tensor) and x.is_floating_point():
                    yield node.name, x


def with_all_tokens(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Floating values with the length of the whole sequence, or of all rows of it, in their shape."""
    return {name: tuple(x.shape) for name, x in floating(cell) if {LONG, LONG * LONG_ROWS} & set(x.shape)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_value_has_the_whole_sequence(ranks: int) -> None:
    assert len(with_all_tokens(cell_of(1))) > 50, "the shapes that are looked for"
    assert not with_all_tokens(cell_of(ranks))


def test_with_ulysses_only_attention_has_the_whole_sequence_of_its_heads() -> None:
    """No value is larger than hidden states of a rank's own tokens."""
    found = with_all_tokens(cell_of(2, "ulysses"))
    assert found and {shape[:1] + shape[2:3] for shape in found.values()} == {(LONG_ROWS, LONG)}
    assert max(shape[1] for shape in found.values()) == HEADS // 2
    widest = max(TINY["llama"].sizes[name] for name in ("intermediate_size", "vocab_size"))
    assert max(x.numel() for _, x in floating(cell_of(2, "ulysses"))) <= LONG_ROWS * LONG // 2 * widest


def measured(cell: Cell) -> int:
    """On a rank: bytes that F keeps beside parameters and inputs, by their storages."""
    groups = Groups(init_mesh("cpu", 30.0, **cell.mesh.sizes))
    made = compiled(cell)
    executor, values = Executor(made, groups), values_of(made, cell.name, groups)
    held = {x.untyped_storage().data_ptr() for x in values.values()}
    _, paused = executor.run_forward(values)
    storages = {s.data_ptr(): s.nbytes() for _, x in paused.saved if (s := x.untyped_storage())}
    return sum(size for at, size in storages.items() if at not in held)


def test_what_ranks_keep_is_what_was_counted() -> None:
    kept = on_ranks(cell_of(2), measured)
    assert kept[0] == kept[1] == pytest.approx(of(2).saved, rel=0.01)
    assert torch.tensor(kept).sum() == pytest.approx(of(1).saved, rel=0.02)
    assert min(kept) > LONG_ROWS * LONG // 2 * HIDDEN * 8, "more than one hidden state"
