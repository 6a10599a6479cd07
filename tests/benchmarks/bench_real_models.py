"""How long real models take to compile for large meshes: processor time from the model on the meta device to the step
graphs, by stage; whole pipelines, all stages.

    python tests/benchmarks/bench_real_models.py [--only llama_8b,t5_11b] [--profile cumtime]

Nothing runs and no weight is made.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers
from common import load, publish, table
from torch import nn

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # knows transformers models
from autopar.options import Options
from autopar.steps.graphs import Compiled, StepGraph

STAGES = ("capture", "plan", "propagate_placements", "lower_to_local", "differentiate")


@dataclass(frozen=True)
class Case:
    """A model class and config of transformers, a mesh, options and the shape of the whole batch."""

    model: str
    config: str
    sizes: dict[str, Any]
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 8, "tp": 8})
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    length: int = 8192

    def build(self) -> nn.Module:
        """The model, without weights."""
        with torch.device("meta"):
            config = getattr(transformers, self.config)(**self.sizes)
            model: nn.Module = getattr(transformers, self.model)(config).bfloat16()
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """Only their shapes matter."""
        if self.model.startswith("ViT"):
            image = self.sizes["image_size"]
            return {
                "pixel_values": torch.empty(self.batch, 3, image, image, device="meta", dtype=torch.bfloat16),
                "labels": torch.empty(self.batch, dtype=torch.long, device="meta"),
            }
        ids = torch.empty(self.batch, self.length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids.clone()}


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_405B = {
    **LLAMA_8B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128,
}  # fmt: skip
CASES = {
    "llama_8b": Case("LlamaForCausalLM", "LlamaConfig", LLAMA_8B),
    "llama_8b_cp16": Case(
        "LlamaForCausalLM", "LlamaConfig", LLAMA_8B, {"dp": 8, "cp": 16, "tp": 8}, {"attention": "auto"}
    ),
    "llama_405b": Case(
        "LlamaForCausalLM", "LlamaConfig", LLAMA_405B, {"dp": 128, "tp": 8, "pp": 16},
        {"microbatches": 64, "schedule": "1f1b"}, batch=128 * 64,
    ),
    "mixtral_8x22b": Case(
        "MixtralForCausalLM", "MixtralConfig",
        {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
         "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32768, "max_position_embeddings": 65536},
        length=4096,
    ),
    "deepseek_v3": Case("DeepseekV3ForCausalLM", "DeepseekV3Config", {}, length=4096),
    "t5_11b": Case(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "vocab_size": 32128,
         "decoder_start_token_id": 0},
        length=512,
    ),
    "vit_22b": Case(
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 48, "num_attention_heads": 48,
         "image_size": 224, "patch_size": 14, "num_labels": 1000},
    ),
}  # fmt: skip


def compiled(case: Case) -> tuple[Compiled, float]:
    """(all step graphs, processor seconds)."""
    model, inputs = case.build(), case.inputs()
    start = time.process_time()
    found = compile_model(model, inputs, Mesh.of(**case.mesh), Options(**case.options), outputs=())
    return found, time.process_time() - start


def main() -> None:
    """Compile all, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="another choice leaves the page alone")
    parser.add_argument("--profile", help="a column of pstats to sort by")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = load()
    warm = {**LLAMA_8B, "num_hidden_layers": 2}
    compiled(Case("LlamaForCausalLM", "LlamaConfig", warm))  # imports, caches
    rows = [_profiled(chosen.profile, lambda name=name: _row(name)) for name in chosen.only.split(",")]
    text = f"{before}.\n\n{table(['model', 'mesh', 'nodes', 'seconds', *STAGES, 'rest', 'peak MiB'], rows)}"
    publish("real_models", text) if chosen.only == parser.get_default("only") else print(text)


def _row(name: str) -> list[object]:
    case = CASES[name]
    found, seconds = compiled(case)
    nodes = sum(len(graph.graph.nodes) for graph in _graphs(found))
    stages = [found.timings.get(stage, 0.0) for stage in STAGES]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    mesh = " ".join(f"{axis}={size}" for axis, size in case.mesh.items())
    times = (seconds, *stages, seconds - sum(stages))
    return [name, mesh, nodes, *(f"{s:.2f}" for s in times), f"{peak:.0f}"]


def _graphs(found: Compiled) -> list[torch.fx.GraphModule]:
    steps = [getattr(part, item.name) for part in found.pipeline.parts for item in fields(part)]
    return [step.graph for step in steps if isinstance(step, StepGraph)]


def _profiled(column: str | None, run: Callable[[], list[object]]) -> list[object]:
    if column is None:
        return run()
    profile = cProfile.Profile()
    row: list[object] = profile.runcall(run)
    pstats.Stats(profile).sort_stats(column).print_stats(60)
    return row


if __name__ == "__main__":
    main()
