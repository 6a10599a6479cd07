"""Who got the tokens and what left a rank, as measured, in the report of a traced step."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from autopar.api import parallelize
from autopar.report.html.expert_section import heat_map
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from tests.experts.test_experts import Layer, routed
from tests.support.ranks import run_ranks

ROW = 4 * 8  # bytes: `Layer` is 4 wide, in float64


def traced(folder: Path, batch: dict[str, Tensor]) -> int:
    """Bytes of rows that left this rank in the second of two equal steps."""
    model = parallelize(Layer(8), init_mesh("cpu", 60.0, ep=2), example_batch=batch, token_dispatcher="alltoall")
    part, parts = dp_rank_and_size(model.mesh)
    model.trace(folder, **{name: x.chunk(parts)[part] for name, x in batch.items()})
    return model.traffic()["ep", "all_to_all_rows"].bytes // 2


def test_a_traced_step(tmp_path: Path) -> None:
    """6 tokens a rank, 2 experts each, all on rank 1: 12 rows go there and 12 gradients of what comes back, and 12 of
    each the other way."""
    assert run_ranks(2, traced, tmp_path, routed(12, 8, 2, "one")) == [2 * 12 * ROW, 2 * 12 * ROW]
    page = (tmp_path / "report.html").read_text()
    cells = re.findall(r"expert (\d+): (\d+) of (\d+)", page)
    assert [int(count) for _, count, _ in cells] == [0, 0, 0, 0, 0, 0, 24, 24]  # of two steps
    (row,) = re.findall(r"<tr>(<td>ep</td>.*?)</tr>", page)
    assert re.findall(r">([^<>]+)</td>", row) == ["ep", "4", "768 B", "768 B", "768 B", "768 B"]


def test_cells_are_as_dark_as_their_experts_are_busy() -> None:
    picture = heat_map({"layers.0": [0, 10, 10, 20], "a <name>": [0, 0, 0, 0]})
    assert re.findall(r'fill-opacity="([\d.]+)"', picture) == ["0", "0.5", "0.5", "1", "0", "0", "0", "0"]
    assert ">2.00<" in picture and ">none<" in picture and "a &lt;name&gt;" in picture
