"""Windows of computed tensors against the whole, cut; and what of the inputs they read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import core_model_loading as loading

from autopar.ir.weight_conversion import Making
from autopar.runtime.checkpoint.partial_reads import Window, pulled, traced

CONFIG = SimpleNamespace(num_attention_heads=2)
MODEL = SimpleNamespace(
    config=CONFIG, get_parameter=lambda name: torch.empty({"q": (3, 2), "k": (5, 2), "x": (4, 6)}[name], device="meta")
)


def converted(ops: list[Any], sources: list[str], targets: list[str], counts: list[int]) -> Making:
    """As transformers runs a converter, on so many tensors of each source."""

    def make(tensors: Any) -> dict[str, Tensor]:
        rest, held = list(tensors), {}
        for source, count in zip(sources, counts):
            held[source], rest = rest[:count], rest[count:]
        for op in ops:
            held = op.convert(
                held, source_patterns=sources, target_patterns=targets, config=CONFIG, model=MODEL,
                full_layer_name=targets[0],
            )  # fmt: skip
        return {name: x[0] if isinstance(x, list) else x for name, x in held.items()}

    return make


EXPERTS = [(4, 6)] * 6
CASES: dict[str, tuple[Making, list[tuple[int, ...]]]] = {
    "merge": (converted([loading.MergeModulelist(0)], ["e.*"], ["w"], [6]), EXPERTS),
    "merge_two": (
        converted([loading.MergeModulelist(0), loading.Concatenate(1)], ["g.*", "u.*"], ["w"], [3, 3]), EXPERTS,
    ),
    "merge_transposed": (
        converted([loading.MergeModulelist(1), loading.Transpose(0, 2)], ["e.*"], ["w"], [6]), EXPERTS,
    ),
    "split_experts": (converted([loading.SplitModulelist(0)], ["w"], ["e.*.x"], [1]), [(3, 4, 5)]),
    "cat": (converted([loading.Concatenate(0)], ["a", "b", "c"], ["w"], [1, 1, 1]), [(2, 4), (5, 4), (1, 4)]),
    "chunk": (converted([loading.Chunk(1)], ["w"], ["a", "b", "c"], [1]), [(4, 8)]),
    "split": (converted([loading.Split(0)], ["w"], ["q", "k"], [1]), [(8, 2)]),
    "interleave": (converted([loading.Interleave(1)], ["w"], ["x"], [1]), [(4, 6, 3)]),
    "interleave_chunk": (
        converted([loading.Interleave(0), loading.Chunk(0)], ["w"], ["a", "b"], [1]), [(8, 3)],
    ),
    "transpose": (converted([loading.Transpose(0, -1)], ["w"], ["x"], [1]), [(4, 6)]),
    "transpose_if_needed": (converted([loading.Transpose(0, 1, check_dims=True)], ["w"], ["x"], [1]), [(6, 4)]),
    "not_transposed": (converted([loading.Transpose(0, 1, check_dims=True)], ["w"], ["x"], [1]), [(4, 6)]),
    "rope": (converted([loading.PermuteForRope()], ["w"], ["x"], [1]), [(8, 3)]),
    "conv": (converted([loading.LinearToConv3d(2, (1, 2, 3))], ["w"], ["x"], [1]), [(4, 12)]),
    "ernie": (
        converted([loading.ErnieFuseAndSplitTextVisionExperts()], ["g.*", "u.*"], ["text", "vision"], [4, 4]),
        [(4, 6)] * 8,
    ),
    "views": (lambda x: {"a": x[0][1:-1, ::2].t().unsqueeze(1), "b": x[0].select(1, -1), "c": x[0].unbind(1)[2],
                         "d": x[0].reshape(2, 3, 5).permute(2, 0, 1)},
              [(6, 5)]),
    "arithmetic": (lambda x: {"a": (x[0] + 1).t(), "b": x[0].topk(2, 1)[0], "c": torch.cat([x[0], x[0].exp()], -1)},
                   [(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole(case: str) -> None:
    make, shapes = CASES[case]
    generator, draw = torch.Generator().manual_seed(0), random.Random(0)
    inputs = [torch.rand(shape, generator=generator) for shape in shapes]
    whole = make(inputs)
    nodes = traced(make, [x.to("meta") for x in inputs])
    assert nodes.keys() == whole.keys()
    for name, expected in whole.items():
        assert nodes[name].meta["val"].shape == expected.shape
        windows: list[Window] = [(), tuple(slice(0, 0) for _ in expected.shape)]
        for _ in range(20):
            pairs = [sorted(draw.sample(range(size + 1), 2)) for size in expected.shape]
            windows.append(tuple(slice(*pair) for pair in pairs))
        for window in windows:
            found = pulled(nodes[name], window, lambda i, part: inputs[i][part])
            assert torch.equal(found, expected[window]), (name, window)


def read_for(case: str, window: Window) -> list[tuple[int, tuple[int, ...]]]:
    """(number, shape) of what is read of the inputs."""
    make, shapes = CASES[case]
    nodes = traced(make, [torch.empty(shape, device="meta") for shape in shapes])
    found: list[tuple[int, tuple[int, ...]]] = []

    def read(number: int, part: Window) -> Tensor:
        piece = torch.zeros(shapes[number])[part]
        found.append((number, tuple(piece.shape)))
        return piece

    pulled(next(iter(nodes.values())), window, read)
    return found


def test_nothing_else_is_read() -> None:
    first_two, half = (slice(0, 2), slice(0, 8), slice(0, 6)), (slice(0, 3), slice(2, 6), slice(0, 6))
    assert read_for("merge_two", first_two) == [(0, (4, 6)), (1, (4, 6)), (3, (4, 6)), (4, (4, 6))]
    assert read_for("merge_two", half) == [(i, (2, 6)) for i in range(6)]  # two rows of each gate, two of each up
    assert read_for("merge_transposed", (slice(1, 3), slice(5, 6), slice(0, 4))) == [(5, (4, 2))]
    assert read_for("cat", (slice(6, 8), slice(0, 4))) == [(1, (1, 4)), (2, (1, 4))]
    assert read_for("interleave", (slice(1, 2), slice(0, 6), slice(0, 3))) == [(0, (1, 6, 3))]
    assert read_for("rope", (slice(0, 1), slice(0, 3))) == [(0, (8, 3))]  # across all rows: the whole
