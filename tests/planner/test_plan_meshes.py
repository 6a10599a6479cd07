"""`autopar plan` of several meshes, and what it remarks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import LLAMA, run


def test_plan_of_several_meshes_stands_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One batch that all can cut; options count where their axis is; a mesh that cannot have the model says why."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    meshes = ("--mesh", "dp=4", "--mesh", "tp=2", "--mesh", "cp=3", "--mesh", "pp=2,dp=2")
    more: tuple[Any, ...] = ("--seq", 16, "--microbatches", 2, "--zero", 1, "--sequence-parallel")
    more = (*more, "--schedule", "1f1b", "--topology", "tp=switch:300e9", "--target-hardware", "h100")
    code, out, err = run(capsys, "plan", "--config", config, *meshes, *more, "--json", "--dump", tmp_path / "d")
    assert code == 0, err
    found = json.loads(out)
    assert [row["mesh"] for row in found] == [{"dp": 4}, {"tp": 2}, {"cp": 3}, {"pp": 2, "dp": 2}]
    assert "sequence length 16" in found[2]["refused"]
    planned = [row for row in found if "refused" not in row]
    assert all("input_ids [8, 16]" in row["model"] and row["options"]["target_hardware"] == "H100" for row in planned)
    assert [row["options"]["zero"] for row in planned] == [1, 0, 1]
    assert [row["options"]["topology"] for row in planned] == ["", "tp=switch:3e11:1e-5", ""]
    assert planned[2]["pipeline"]["schedule"] == "1f1b"
    assert {p.name for p in (tmp_path / "d").iterdir()} >= {"dp=4", "tp=2", "pp=2-dp=2"}

    code, out, _ = run(capsys, "plan", "--config", config, *meshes, *more)
    assert code == 0 and out.count("fastest") == 1 and "8 examples of 16 tokens" in out
    fastest = min(planned, key=lambda row: float(row["step"]["seconds"]))
    mesh = ",".join(f"{axis}={size}" for axis, size in fastest["mesh"].items())
    assert re.search(rf"fastest │ {mesh} ", out)
    code, out, _ = run(capsys, "plan", "--config", config, "--mesh", "cp=3", "--mesh", "cp=5", "--seq", 16)
    assert code == 2 and "fastest" not in out


def test_plan_remarks_on_sequences_beyond_the_models_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"max_position_embeddings": 16, "num_hidden_layers": 1}))
    code, _, err = run(capsys, "plan", "--config", path, "--mesh", "dp=2", "--seq", 32, "--json")
    assert code == 0 and "llama is made for 16 positions (max_position_embeddings), found a length of 32" in err
    code, _, err = run(capsys, "plan", "--config", path, "--mesh", "dp=2", "--seq", 16, "--json")
    assert code == 0 and "positions" not in err
