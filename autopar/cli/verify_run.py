"""`autopar verify`: a model of a config with random weights, on local ranks, and a batch for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.models import hf_configs as hf
from autopar.options import Options
from autopar.runtime.mesh.process_groups import init_mesh
from autopar.runtime.training.launch import launch
from autopar.verification import Report, verify


def verify_config(
    config: Any,
    mesh: Mesh,
    options: Options | None = None,
    *,
    seq: int = 16,
    batch: int = 4,
    dtype: torch.dtype = torch.float64,
    timeout: float = 300.0,
) -> int:
    """``python -m autopar verify``: build the model of a transformers config, with random weights, on local gloo ranks,
    verify a random batch with unevenly ignored labels, print the table. Returns 0, or 1 for a mismatch.

    ``config``: a transformers config, or the path of a config.json. float64 compares exactly, other dtypes to
    `TOLERANCES`. Raises ValueError for bad input, before any process starts where possible.
    """
    config = hf.load_config(config) if not hasattr(config, "model_type") else config
    hf.batch_of(hf.build(config, dtype), batch, seq)  # on the meta device: refuses bad input here
    task = (config, dict(mesh.axes), options or Options(), seq, batch, dtype, timeout)
    report: Report = launch(_command_rank, mesh.world_size, task, timeout=timeout, device="cpu")[0]
    print(report)
    return 0 if report.passed else 1


def _command_rank(
    config: Any, sizes: dict[str, int], options: Options, seq: int, batch: int, dtype: torch.dtype, timeout: float
) -> Report:
    """Runs on each rank."""
    torch.manual_seed(0)
    model = hf.build(config, dtype, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # move norms and biases away from ones and zeros, so that mistakes about them show
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tokens = getattr(config.get_text_config(), "vocab_size", 2)
    data = random_batch(hf.batch_of(model, batch, seq), tokens, len(config.id2label or {}))
    mesh = init_mesh("cpu", timeout, **sizes)
    given = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return verify(model, mesh, data, lift_to_float64=dtype == torch.float64, **given)


def random_batch(shapes: Mapping[str, Tensor], vocabulary: int, classes: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch of these shapes: random tokens, normal features, labels of which example i ignores the first i or so.

    Labels with one number per example are classes, or floats for a regression.
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, like in shapes.items():
        shape = like.shape
        if like.is_floating_point():
            out[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
            continue
        limit = classes if name == "labels" and like.dim() == 1 else vocabulary
        out[name] = torch.randint(min(3, limit - 1), limit, shape, generator=generator)
        if name == "labels" and like.dim() == 2:
            out[name][ignored_labels(shape[0], shape[1], generator)] = -100
    return out


def ignored_labels(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Example i ignores its first i % length labels and one in four of the others: no two ranks have the same count."""
    dropped = torch.rand(rows, length, generator=generator) < 0.25
    return dropped | (torch.arange(length) < (torch.arange(rows) % max(length - 1, 1)).unsqueeze(-1))
