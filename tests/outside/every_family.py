"""One training step of a small model of every family of transformers on two real ranks, beside one process.

python -m tests.outside.every_family             those without a row in docs/families.md (hours on two cores)
python -m tests.outside.every_family bert vit    these families anew

A family is a folder of `transformers.models`. Those that tests/hf/test_zoo.py and docs/models.md have are left out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
import pkgutil
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import is_refusal
from autopar.ir.batch import part_of_batch
from autopar.ir.mesh import Mesh
from autopar.runtime.module.parallel_module import step_seed
from autopar.testing.reference import LIMIT, Expected, compare_step, eager
from tests.hf.zoo import CAUSAL, WITHOUT_ATTENTION
from tests.outside import small_configs
from tests.outside.family_batches import batches
from tests.outside.family_facts import CLASS, LEFT_OUT, MORE
from tests.support.ranks import close_pools, run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
SEED = step_seed(0, 1)  # of the first step
MESHES = {"dp=2": {"dp": 2}, "tp=2": {"tp": 2}}
EXACT = "exact"
MOST = 20e6  # parameters: what is larger was not made small
# Families of docs/models.md.
ELSEWHERE = {
    "blip",
    "clip",
    "cohere2_vision",
    "colpali",
    "colqwen2",
    "cosmos3_edge",
    "cosmos3_omni",
    "decision_transformer",
    "detr",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "fuyu",
    "git",
    "hunyuan_vl",
    "idefics2",
    "idefics3",
    "internvl",
    "kosmos2",
    "led",
    "lfm2_vl",
    "lfm3_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "longformer",
    "mask2former",
    "minicpmv4_6",
    "minimax_m3_vl",
    "mllama",
    "modernvbert",
    "nllb_moe",
    "ovis2",
    "paddleocr_vl",
    "paligemma",
    "patchtst",
    "qwen2_5_omni",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
    "sam",
    "siglip",
    "smolvlm",
    "speecht5",
    "switch_transformers",
    "ultravbert",
    "videomae",
}
# The first class whose name ends so; else the last one of the family.
_HEADS = (
    "ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForImageClassification",
    "ForObjectDetection", "ForSemanticSegmentation", "ForCTC", "ForPrediction", "ForTokenClassification",
    "ForQuestionAnswering", "ForSequenceClassification", "ForAudioClassification", "ForVideoClassification",
)  # fmt: skip


class OwnLoss(nn.Module):
    """A model that makes no loss, with one of all that it returns but what stands for infinity."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **inputs: Any) -> Tensor:
        found = [x for x in pytree.tree_leaves(self.body(**inputs)) if isinstance(x, Tensor) and x.requires_grad]
        kept = [torch.where(x.abs() < 1e4, x, 0.0) for x in found if x.is_floating_point()]
        return torch.stack([(x * x).mean() for x in kept]).sum()


# --- which ----------------------------------------------------------------------------------------------------


@functools.cache
def families() -> dict[str, str]:
    """The class of each family."""
    root = transformers.models
    zoo = {transformers.CONFIG_MAPPING[kind].__module__.split(".")[-2] for kind in (*CAUSAL, *WITHOUT_ATTENTION)}
    folders = sorted(one.name for one in pkgutil.iter_modules(root.__path__) if one.ispkg)
    found = {f: _class_of(f) for f in folders if f not in zoo and f not in ELSEWHERE}
    return {folder: name for folder, name in found.items() if name}


def _class_of(folder: str) -> str:
    if folder in CLASS:
        return CLASS[folder]
    names = [
        name for path in sorted((Path(transformers.__file__).parent / "models" / folder).glob("modeling_*.py"))
        for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.M)
    ]  # fmt: skip
    kinds = [
        name for name in names if _is_model(getattr(transformers, name, None)) and not name.endswith("PreTrainedModel")
    ]
    for head in _HEADS:
        if found := [name for name in kinds if name.endswith(head)]:
            return found[0]
    whole = [name for name in kinds if "For" in name] or [name for name in kinds if name.endswith("Model")] or kinds
    return whole[-1] if whole else ""


def _is_model(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)


# --- small models ---------------------------------------------------------------------------------------------


@functools.lru_cache(1)
def made(name: str) -> tuple[nn.Module, dict[str, Any], Expected]:
    """A small model of a class in float64 in train mode, its batch, and what one process gets. Raises what transformers
    raises where none runs."""
    kind, said = getattr(transformers, name), []
    for how in (small_configs.small, small_configs.scaled, small_configs.shallow):
        try:
            return _made(kind, how(kind.config_class, MORE.get(name)))
        except Exception as error:
            said.append(f"{how.__name__}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(said))


def _made(kind: Any, config: Any) -> tuple[nn.Module, dict[str, Any], Expected]:
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    assert count < MOST, f"{count:.1e} parameters"
    torch.manual_seed(0)
    model = kind(config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    with torch.no_grad():
        for p in model.parameters():
            if normed and p.dim() == 4:  # small kernels leave batch norms a variance below the rounding of their mean
                nn.init.kaiming_normal_(p)
            if p.dim() == 1:  # off their zeros and ones, so that a mistake about them shows
                p.add_(torch.randn_like(p), alpha=0.05)
    said = []
    for batch in batches(model):
        for whole in (model, OwnLoss(model)):
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    expected = eager(whole, batch, SEED)
                assert math.isfinite(expected.loss), "the loss is not finite"
                return whole, batch, expected
            except Exception as error:
                said.append(f"{sorted(batch)}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(said) or "no batch is known")


# --- on ranks -------------------------------------------------------------------------------------------------


def on_rank(name: str, sizes: dict[str, int]) -> str:
    """`EXACT`, the words of a refusal, or what is wrong (it begins with "wrong")."""
    warnings.simplefilter("ignore")
    model, batch, expected = made(name)
    mesh = Mesh.of(**sizes)
    at = mesh.dp_rank_and_size(mesh.coordinate(dist.get_rank()))
    part = part_of_batch(batch, dict.fromkeys(batch, 0), mesh.data_size, at, 1, 1)
    try:
        groups = autopar.init_mesh("cpu", 60.0, **sizes)
        parallel = autopar.parallelize(model, groups, lift_to_float64=True, example_batch=part)
        loss = parallel.train_step(**part)
        found = parallel.full_gradients()
    except Exception as error:
        return str(error) if is_refusal(error) else f"wrong: {traceback.format_exc()}"
    total = sum(float(x) for x in (loss if isinstance(loss, tuple) else (loss,)))
    errors = compare_step(total, found, expected, parallel.parameter_specs, lambda spec, whole: whole)
    return EXACT if errors.worst < LIMIT * _size(expected) else f"wrong: {errors}"


def _size(expected: Expected) -> float:
    """The greatest magnitude of the loss and its gradients, at least 1."""
    found = (float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel())
    return max(1.0, abs(expected.loss), *found)


def outcome(family: str, mesh: str) -> str:
    """What all ranks say of a step, or the first that says something else than `EXACT`."""
    said = run_ranks(2, on_rank, families()[family], MESHES[mesh], timeout=200.0)
    worst = next((words for words in said if words != EXACT), EXACT)
    if worst.startswith("wrong"):
        close_pools()
    return worst


# --- the page -------------------------------------------------------------------------------------------------

HEAD = """# Families of transformers

A small model of every family of transformers that neither [models.md](models.md) nor `tests/hf/test_zoo.py` has, one
class each: one training step on two real ranks, dp=2 and tp=2. *exact* means that the loss and all gradients equal one
process to 1e-10 in float64, relative to the greatest of them where it exceeds 1. Configs are made small by the names of
their sizes (`tests/outside/small_configs.py`), batches by the arguments of the forward
(`tests/outside/family_batches.py`): images beside text where the config has a token for them. A model that returns no
loss for this batch gets one of all that it returns. Generated by `python -m tests.outside.every_family`.

"""


def row(family: str) -> str:
    """A family on both meshes."""
    return f"| {family} | {families()[family]} | {' | '.join(_cell(outcome(family, mesh)) for mesh in MESHES)} |"


def _cell(words: str) -> str:
    text = re.sub(r"/\S*/(\w+/\w+\.py)", r"\1", " ".join(words.split())).replace("|", "\\|")
    return text if words == EXACT else text[:600] if words.startswith("wrong") else f"refused: {text[:400]}"


def rows_of_page(page: str) -> dict[str, str]:
    lines = page.partition(" class |")[2].splitlines()[1:]
    return {line[2:].partition(" | ")[0]: line for line in lines if re.match(r"\| \w+ \| \w+ \|", line)}


def text(rows: dict[str, str]) -> str:
    """The page."""
    rows = {family: rows[family] for family in sorted(rows)}
    exact = sum(line.count(f"| {EXACT} ") == len(MESHES) for line in rows.values())
    left = [f"- {family}: {why}" for family, why in sorted(LEFT_OUT.items())]
    lines = [f"{len(rows)} families: {exact} are exact, {len(rows) - exact} are refused.", "",
             f"| family | class | {' | '.join(MESHES)} |", "|---" * (2 + len(MESHES)) + "|", *rows.values(), "",
             "Not tried:", "", *left]  # fmt: skip
    return HEAD + "\n".join(lines).rstrip() + "\n"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = rows_of_page(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    known = {family: line for family, line in known.items() if family in families()}
    for count, family in enumerate(names or [f for f in families() if f not in known and f not in LEFT_OUT], 1):
        try:
            known[family] = row(family)
        except AssertionError as error:
            print(family, "not made:", str(error)[-1500:], flush=True)
            continue
        print(known[family], flush=True)
        PAGE.write_text(text(known), encoding="utf-8")  # what stops a run leaves its rows
        if count % 20 == 0:
            close_pools()  # ranks keep what they compiled


if __name__ == "__main__":
    main(sys.argv[1:])
