"""What is misspelled is told with what was probably meant: options, values, axes, plans, batches, command lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import _options
from autopar.capture.front_end import capture
from autopar.cli.main import COMMANDS, main
from autopar.ir.mesh import Mesh
from autopar.ir.placement import parse_placement
from autopar.options import DECLARED, OTHER_WORDS
from autopar.runtime.inputs.call_arguments import by_name, check_input_names, misspelled
from autopar.runtime.inputs.padding import asked_padding
from autopar.spelling import closest
from tests.support.plain_models import Net

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 3}, "zero"),
    ({"microbatch": 2}, "microbatches"),
    ({"micro_batches": 2}, "microbatches"),
    ({"gradient_accumulation_steps": 2}, "microbatches"),
    ({"mixed_precision": "bf16"}, "precision"),
    ({"checkpointing": "full"}, "activation_checkpoint"),
    ({"example_batchs": {}}, "example_batch"),
    ({"backends": "eager"}, "backend"),
    ({"precision": "bfloat16"}, "bf16"),
    ({"precision": "torch.float16"}, "fp16"),
    ({"precision": "BF16"}, "bf16"),
    ({"zero": "3"}, "3"),
    ({"sequence_parallel": "true"}, "True"),
    ({"reshard_after_forward": "true"}, "True"),
    ({"reduce_grads": "micro-batch"}, "microbatch"),
    ({"cp_load_balance": "zig_zag"}, "zigzag"),
    ({"expert_axis": "eq"}, "ep"),
    ({"token_dispatcher": "hierarchic"}, "hierarchical"),
    ({"aux_loss_scope": "globalbatch"}, "global_batch"),
    ({"target_hardware": "h10"}, "H100"),
    ({"token_dispatcher": "two_level"}, "hierarchical"),
    ({"aux_loss_scope": "exact"}, "global_batch"),
    *(({word: 1}, name) for word, name in OTHER_WORDS.items()),
]


@pytest.mark.parametrize(("given", "meant"), OPTIONS, ids=str)
def test_options_and_their_values(given: dict[str, Any], meant: str) -> None:
    with pytest.raises(ValueError, match=rf"did you mean '?{meant}'?\?$"):
        _options(given)


def meant(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match="did you mean") as caught:
        call()
    return str(caught.value).rpartition("did you mean ")[2].removesuffix("?)").removesuffix("?").strip("'")


def test_axes_placements_shapes_and_names_in_plans() -> None:
    axes = {"mp": "tp", "data": "dp", "ddp": "dp", "TP": "tp", "dq": "dp", "fsdp": "dp"}
    assert {axis: meant(lambda axis=axis: Mesh.of(**{axis: 2})) for axis in axes} == axes
    placements = {"Shard(1)": "S(1)", "Replicate()": "R", "s(0)": "S(0)", "Partial": "P"}
    assert {text: meant(lambda text=text: parse_placement(text)) for text in placements} == placements
    assert meant(lambda: asked_padding("buckets")) == "bucket"
    assert meant(lambda: autopar.Precision("bf16")) == "bfloat16"
    assert closest("xp", ("dp", "tp")) is None and closest("nothing", DECLARED) is None


class AnyName(nn.Module):
    def forward(self, ids: Tensor, labels: Tensor | None = None, **more: Any) -> Tensor:
        return ids.sum()


def test_batches() -> None:
    net, x = Net(), torch.zeros(2, 2)
    names = list(by_name(net, (), dict.fromkeys(("x", "target"), x)))
    assert meant(lambda: by_name(net, (), {names[0]: x, "tagret": x})) == "target"
    with pytest.raises(ValueError, match=r"found a dict of them; unpack it, as in .*\*\*batch"):
        by_name(net, ({"x": x, "target": x},), {})
    assert misspelled(AnyName(), {"ids": x, "label": x}).endswith("found 'label'; did you mean 'labels'?)")
    assert not misspelled(AnyName(), {"ids": x, "position": x}) and not misspelled(net, {"x": x, "tagret": x})
    assert meant(lambda: check_input_names(net, "batch_dims", ["tagret"])) == "target"


class OneDict(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"].sum()


def test_a_dict_that_is_one_argument_is_one() -> None:
    assert by_name(OneDict(), ({"x": 1},), {}) == {"batch": {"x": 1}}


def test_ids_that_are_no_whole_numbers() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Any) -> Tensor:
            return self.table(ids).mean()

    for ids, words in (
        (torch.rand(2, 3), "needs indices of int64, found float32; pass ids.long()"),
        ([1, 2], "needs a tensor as 'indices', found a list; pass a tensor"),
    ):
        with pytest.raises(ValueError, match=r"capture: .*self.table\(ids\)") as caught:
            capture(Tokens(), {"ids": ids})
        assert str(caught.value).endswith(words) and "torch.export" not in str(caught.value)


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


LINES = {
    "pln": "plan",
    "plan --config C --mesh dp=2 --chekpoint full": "--activation-checkpoint",
    "plan --config C --mesh dp=2 --micro-batches 2": "--microbatches",
    "plan --config C --mesh dp=2 --activation-checkpoint ful": "full",
    "plan --config C --mesh dp=2 --schedule gpip": "gpipe",
    "plan --config C --mesh dp=2 --attention ring+tokenring": "token_ring",
    "plan --config C --mesh dp=2 --topology rng": "ring",
    "plan --config C --mesh dp=2 --dtype bfloat61": "bfloat16",
    "plan --config C --mesh mp=2": "tp",
    "show --config C --mesh dp=2 --level forwrd": "forward",
    "schedule --name gpip --stages 2 --microbatches 2": "gpipe",
    "experts --target-hardware h10": "H100",
    "plan --config C --mesh dp=2 --whole-ops aten.sinc.default": "--replicate-ops",
    "plan --config C --mesh rp=2": "dp_replicate",
}


def test_command_lines(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line, expected in LINES.items():
        words = line.replace(" C ", f" {config} ").split()
        try:
            code: object = main(words)
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr().err
        assert code == 2 and said.endswith(f"did you mean {expected!r}?\n") and said.count("\n") == 1, (line, said)


def test_a_typo_is_told_before_torch_is_loaded(config: str) -> None:
    lines = [line.replace(" C ", f" {config} ").split() for line in LINES]
    code = f"""
import contextlib, sys
from autopar.cli.main import main
for words in {lines!r}:
    with contextlib.suppress(SystemExit):
        main(words)
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-500:]


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        shown = {}
        for flag in ("--help", *(["--help-all"] if command.often else [])):
            with pytest.raises(SystemExit):
                main([command.name, flag])
            shown[flag] = capsys.readouterr().out
        assert len(shown["--help"].splitlines()) <= 40, command.name
        if command.often:
            assert all(f"{flag} " in shown["--help"] for flag in command.often)
            assert "more options" in shown["--help"] and "more options" not in shown["--help-all"]
    assert all(option.flag in shown_all(capsys) for option in DECLARED.values())


def shown_all(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["plan", "--help-all"])
    return capsys.readouterr().out
