"""The choice for real models: it verifies on real ranks, says why, and is what the command line prints."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.auto.choice import Asked, choose
from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation
from autopar.auto.search import brute_force
from autopar.auto.space import Space
from autopar.cli.main import main
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.models import hf_configs
from tests.support.ranks import run_ranks

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 64, "n_positions": 64,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
BATCH, SEQ = 8, 16


def chosen(config: dict[str, Any], ranks: int, cluster: str = "H100", **given: Any) -> Explanation:
    asked, nodes = Asked(ranks, BATCH, SEQ, given), Cluster.parse(cluster)
    stack = replace(stack_named("autopar-eager", nodes.chip_name), reserved=0.0)
    return choose(costed(json.dumps(config)), asked, nodes, stack)


@functools.cache
def costed(config: str) -> CostedModel:
    """Placements are compiled once for all tests."""
    return CostedModel.from_config(json.loads(config), SEQ)


def verified(config: dict[str, Any], sizes: dict[str, int], options: dict[str, Any]) -> float:
    """1.0 if a step is that of one process."""
    torch.manual_seed(0)
    model = hf_configs.build(hf_configs.config_of(config), torch.float64, "cpu")
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 64
    report = autopar.verify(model, autopar.init_mesh(**sizes), {"input_ids": ids, "labels": ids}, **options)
    return float(report.passed)


@pytest.mark.parametrize(
    ("config", "ranks", "given"),
    [
        (LLAMA, 2, {}),
        pytest.param(LLAMA, 4, {}, marks=pytest.mark.full),
        pytest.param(LLAMA, 4, {"tp": 2, "zero": 1}, marks=pytest.mark.full),
        pytest.param(LLAMA, 4, {"pp": 2}, marks=pytest.mark.full),
        pytest.param(LLAMA, 4, {"cp": 2}, marks=pytest.mark.full),
        (LLAMA, 4, {"pp": 2, "schedule": "zb_v"}),
        (LLAMA, 4, {"memory_limit": 300_000}),
        (GPT2, 4, {}),
        (MIXTRAL, 4, {"ep": 2}),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) and "model_type" in value else str(value),
)  # fmt: skip
def test_a_choice_verifies_on_real_ranks(config: dict[str, Any], ranks: int, given: dict[str, Any]) -> None:
    found = chosen(config, ranks, **given)
    layout = found.choice.layout
    sizes = {name: value for name, value in given.items() if name in layout.mesh.sizes}
    assert sizes.items() <= layout.mesh.sizes.items()
    assert layout.ranks == ranks and layout.batch == BATCH
    options = {name: value for name, value in found.options.items() if name != "memory_limit"}
    assert all(run_ranks(ranks, verified, config, dict(layout.mesh.sizes), options, timeout=120))


def test_the_search_over_compiled_layers_equals_pricing_everything() -> None:
    found = chosen(LLAMA, 4)
    wanted = brute_force(Space(found.found.question).layouts(), found.pricing)
    assert wanted is not None and wanted.layout == found.choice.layout


DENSE_FIRST = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
OTHER_NAMES = {  # no module of it is called experts
    "model_type": "granitemoe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip


def test_experts_are_counted() -> None:
    models = [costed(json.dumps(config)) for config in (LLAMA, MIXTRAL, DENSE_FIRST, OTHER_NAMES)]
    assert [model.experts for model in models] == [0, 4, 8, 6]


# --- the command line ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        code = main(["plan", *(str(a) for a in arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def asked(config: Path) -> list[object]:
    return ["--auto", "--config", config, "--seq", SEQ, "--batch", BATCH]


def test_the_command_prints_and_writes_the_choice(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    code, out, err = run(
        capsys, *asked(config), "--gpus", 4, "--zero", 0, "--mesh", "tp=2", "--json", "--dump", tmp_path
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["mesh"]["tp"] == 2 and "zero" not in found["options"]
    assert found["low"] < found["seconds"] < found["high"]
    assert abs(sum(cause["exposed"] for cause in found["causes"]) - found["seconds"]) < 1e-9
    assert max(found["memory"]) <= found["limit"]
    counts = found["counts"]
    assert counts["all"] == sum(counts.get(name, 0) for name in ("weights", "slower", "refused", "priced"))
    assert not any(row["name"].startswith(("tp=", "zero=")) for row in found["neighbours"])  # these are given
    assert any(row["name"].startswith("activation_checkpoint=") for row in found["neighbours"])
    assert {"choice.html", "choice.json", "plan.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    page = (tmp_path / "choice.html").read_text()
    assert "Time by cause" in page and "<circle" in page and found["command"].split("--mesh")[1][:6] in page
    code, again, err = run(capsys, *found["command"].split()[2:], "--json")
    assert code == 0, err
    assert json.loads(again)["mesh"] == found["mesh"]


def test_the_command_says_why(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    code, out, err = run(capsys, *asked(config), "--cluster", "H100:1x4", "--compute", "fp8")
    assert code == 0, err
    for words in (
        "for 4 GPUs (H100:1x4)",
        "one value changed",
        "what limits",
        "layouts were priced",
        "plan it: autopar",
    ):
        assert words in out
    assert "products in fp8 are a what-if: parallelize runs them with precision='fp8'" in out


def test_the_precision_of_products_is_priced(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    found = {}
    for name, more in {"what if": ("--compute", "fp8"), "run": ("--precision", "fp8")}.items():
        code, out, err = run(capsys, *asked(config), "--cluster", "H100:1x4", "--json", *more)
        assert code == 0, err
        found[name] = json.loads(out)
    assert found["run"]["what_if"] == found["what if"]["what_if"] == {"compute": "fp8"}
    assert found["run"]["causes"] == found["what if"]["causes"]
    assert "--precision fp8" in found["run"]["command"] and "--precision" not in found["what if"]["command"]
    assert any("priced in float8" in remark for remark in found["run"]["remarks"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "auto: needs a number of GPUs, found none in H100"),
        (["--gpus", 8, "--cluster", "H100:2x8"], "cluster: H100:2x8 has 16 chips, found 8 ranks; use all of them"),
        (["--gpus", 8, "--cluster", "H1000"], "cluster: unknown chip 'H1000'"),
        (["--gpus", 8, "--stack", "megatron-2021"], "stack: megatron-2021 is of A100, found chip H100"),
        (["--gpus", 3, "--mesh", "tp=2"], "auto: tp=2 needs a number of GPUs that 2 divides, found 3"),
        (["--gpus", 4096], "auto: 4096 GPUs need a batch of at least"),
        (["--gpus", 4, "--memory-limit", 1000], "auto: nothing fits 4 GPUs"),
        (["--gpus", 4, "--mesh", "cp=3"], "auto: cp=3 needs a number of GPUs that 3 divides, found 4"),
        (["--gpus", 3, "--mesh", "cp=3"], "auto: "),
        (["--gpus", 8, "--mesh", "pp=8"], "auto: pp=8 needs as many layers, found 4; use at most pp=4"),
        (["--gpus", 4, "--mesh", "tp=4", "--zero", 3], "auto: no layout of 4 GPUs for a batch of 8 has"),
        (["--gpus", 4, "--serve"], "auto: chooses layouts to train, found --serve"),
        (["--gpus", 0], "expected a positive whole number, found '0'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_command_refuses(
    capsys: pytest.CaptureFixture[str], config: Path, more: list[object], said: str
) -> None:
    code, out, err = run(capsys, *asked(config), *more)
    assert code == 2 and not out
    assert said in err and len(err.strip().splitlines()) == 1


def test_a_batch_is_needed(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    code, _, err = run(capsys, "--auto", "--config", config, "--gpus", 4)
    assert code == 2 and "auto: needs a batch, the rows of a step; add --batch 1024" in err


def test_help_fits_a_terminal() -> None:
    command = [sys.executable, "-m", "autopar", "plan", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "80", "PATH": ""}).stdout
    assert "--auto" in text
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 80
