"""Constants that were planted into steps are found again, and those that the steps cannot tell apart are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.auto.priced_layouts import LayoutPricer
from autopar.auto.stack_fit import MeasuredStep, fitted, measured_rows
from autopar.cli.main import main
from autopar.cost.efficiency import Stack, stack_named, stack_text

WIDE = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_hidden_layers": 8,
}  # fmt: skip
NARROW = WIDE | {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2816,
}  # fmt: skip
ON_TP = "tp=8", {"sequence_parallel": True}
LAYOUTS = (("dp=8", {}), ("dp=8", {"zero": 3}), ("dp=64", {"zero": 1}), ("dp=1", {}), ON_TP)
START = replace(stack_named("fsdp-2023", "A100"), kernel="flash2", hidden={"dp": 0.1, "zero": 0.1})
PLANTED = replace(
    START, products=0.6, memory=0.5, inside=0.7, network=0.3, launch=30e-6,
    attention=START.attention | {"flash2": 0.35}, attention_backward=START.attention_backward | {"flash2": 0.42},
)  # fmt: skip
FOUND = ("products", "memory", "inside", "network", "launch")


def steps(stack: Stack, wide: bool = True) -> list[MeasuredStep]:
    """What steps of several widths, lengths and layouts take by a stack."""
    lines = []
    for config, seq in ((NARROW, 2048), (NARROW, 8192), (WIDE, 2048), (WIDE, 8192))[: 4 if wide else 1]:
        for mesh, options in LAYOUTS if config is NARROW and seq == 2048 else LAYOUTS[:-1]:
            ranks = int(mesh.split("=")[1]) if mesh.startswith("dp") else 1
            rows = {"config": config, "mesh": mesh, "seq": seq, "options": options, "cluster": "A100", "measured": 1}
            policies = ("none",) if (config, seq) != (NARROW, 8192) else ("none", "full")
            for policy in policies:
                options_ = options | ({"activation_checkpoint": policy} if policy != "none" else {})
                lines += [json.dumps(rows | {"batch": b * ranks, "options": options_}) for b in (1, 4)]
    found = measured_rows(lines, PRICER)
    return [replace(step, seconds=step.predicted(stack)) for step in found]


PRICER = LayoutPricer("A100")


def test_planted_constants_are_found_within_two_percent() -> None:
    fit = fitted(START, steps(PLANTED))
    for name in FOUND:
        assert name in fit.determined
        assert getattr(fit.stack, name) == pytest.approx(getattr(PLANTED, name), rel=0.02), name
    for name in ("attention", "attention_backward"):
        assert getattr(fit.stack, name)["flash2"] == pytest.approx(getattr(PLANTED, name)["flash2"], rel=0.02)
    assert {"float8", "hidden pp", "hidden cp", "hidden ep"} <= set(fit.without_effect)
    assert max(map(abs, fit.errors)) < 0.005 < max(map(abs, fit.before))


def test_wild_steps_do_not_move_the_constants() -> None:
    measured = steps(PLANTED)
    measured[3] = replace(measured[3], seconds=4 * measured[3].seconds)
    fit = fitted(START, measured)
    assert fit.stack.products == pytest.approx(0.6, rel=0.02) and fit.stack.memory == pytest.approx(0.5, rel=0.04)


def test_steps_of_one_size_do_not_tell_constants_apart() -> None:
    alike = [step for step in steps(PLANTED, wide=False) if step.layout.ranks == 1 and step.layout.micro_batch == 4]
    fit = fitted(replace(START, launch=1e-6), alike * 3)
    (together,) = fit.together
    assert {"products", "memory"} <= set(together) and not fit.determined
    assert {"inside", "network", "hidden dp"} <= set(fit.without_effect)
    assert max(map(abs, fit.errors)) < 0.01, "these steps themselves are right"
    assert {"products", "memory", "network"} <= set(fit.stack.guesses)
    assert any(line.startswith("not told apart: products") for line in fit.lines())


# --- the command -----------------------------------------------------------------------------------------------

SMALL = NARROW | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
                  "intermediate_size": 128, "vocab_size": 128}  # fmt: skip


def line(**changes: object) -> str:
    row = {"config": SMALL, "mesh": "dp=2", "seq": 64, "batch": 4, "cluster": "A100", "measured": 0.01} | changes
    return json.dumps({name: value for name, value in row.items() if value is not None})


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["calibrate", *(str(a) for a in arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_the_command_writes_a_stack_that_plans_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, out = tmp_path / "measured.jsonl", tmp_path / "stack.json"
    file.write_text("\n".join([line(), line(batch=8, measured=0.015), line(batch=16, measured=0.025)]))
    code, said, err = run(capsys, "--layouts", file, "--out", out)
    assert code == 0 and "3 steps: off by" in said, err
    stack = stack_named(str(out), "A100")
    assert stack.source == "measured: fit to 3 steps" and stack.guesses
    again = stack_named("autopar-eager", "A100")
    assert json.loads(stack_text(again)).keys() == {"A100"}
    file.write_text(line(measured=None))
    assert main(["plan", "--layouts", str(file), "--stack", str(out), "--cluster", "A100"]) == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(), line()[:-9]], "calibrate: line 2 is torn or wrong: no JSON"),
        ([line(measured=-0.01)], "calibrate: line 1 is torn or wrong: layouts: measured needs seconds above 0"),
        ([line(measured=0)], "measured needs seconds above 0, found 0"),
        ([line(measured="fast")], "measured: expected a number"),
        ([line(measured=None)], "calibrate: line 1 needs measured, the seconds of a step, found none"),
        ([line(), line()], "calibrate: needs 3 measured layouts or more, found 2"),
        ([], "calibrate: needs 3 measured layouts or more, found 0"),
        ([line(), line(cluster="H100"), line()], "calibrate: a stack is fitted to steps of one chip, found A100, H100"),
        ([line(batch=3)] * 3, "calibrate: line 1: batch: 2 data-parallel ranks"),
        ([line(options={"zero": 9})] * 3, "calibrate: line 1: zero"),
        ([line(attention="cudnn")] * 3, ""),
    ],
    ids=str,
)  # fmt: skip
def test_torn_and_negative_measurements(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: list[str], said: str
) -> None:
    file = tmp_path / "measured.jsonl"
    file.write_text("\n".join(lines))
    code, _, err = run(capsys, "--layouts", file)
    assert code == (2 if said else 0) and said in err and len(err.strip().splitlines()) == bool(said), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layouts", "missing.jsonl"], "layouts: 'missing.jsonl' cannot be read"),
        (["--layouts", "x", "--ranks", 2], "--layouts measures nothing, found --ranks as well"),
        (["--cluster", "H100"], "measures the machine it runs on, found --cluster"),
        (["--out", "missing/stack.json"], "needs a folder for 'missing/stack.json', found none"),
        (["--ranks", 0], "expected a positive whole number"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], arguments: list[object], said: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and said in err and len(err.strip().splitlines()) == 1, err
