"""The demo: train a small Llama on a mesh of processes and in one process, and show that both runs agree.

    python -m autopar demo [--steps 100] [--mesh dp=2,tp=2] [--zero 3] [--out demo_output]

The text is the Python standard library's own source code, as bytes. Both runs start from the same weights, see the same
batches and use torch's AdamW; only the mesh differs. Shown are both loss curves, what a rank holds, and what it sends.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.cost.memory import memory
from autopar.ir.mesh import DATA, Mesh
from autopar.ir.traffic import Ledger
from autopar.models.tiny import TINY
from autopar.report.tables import human_bytes
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.runtime.params.parameters import local_tensor
from autopar.runtime.training.launch import launch

VOCAB, LENGTH, BATCH = 256, 128, 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
TEXT_BYTES = 4 * 2**20
REPORT = "graphs/report.html"
SAVED = "saved for backward"
# Sums in another order differ by 1e-7 in float32. Training amplifies that, as it does for two runs that differ in the
# last bit of a weight: the first steps must agree closely, the later ones roughly.
EARLY, EARLY_TOLERANCE, TOLERANCE = 20, 1e-4, 0.1
ROWS = 12  # of the table of losses


@dataclass
class Settings:
    """The arguments of the demo."""

    steps: int
    mesh: dict[str, int]
    zero: int
    out: Path


@dataclass
class DemoRun:
    """One training run: loss per step, seconds per step, memory by kind, and bytes that a rank sends per step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    traffic: Ledger = field(default_factory=dict)


def run_demo(steps: int, mesh: str, zero: int, out: Path) -> int:
    """Run the demo on a mesh such as "dp=2,tp=2"; 0 if both runs agree, 1 if they do not. Raises ValueError for what
    does not fit."""
    settings = _settings(steps, mesh, zero, out)
    settings.out.mkdir(parents=True, exist_ok=True)
    ranks = launch(_on_mesh, nproc=math.prod(settings.mesh.values()), args=(settings,), device="cpu")
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return 0  # under torchrun every rank runs this; only the first one prints
    alone = _alone(settings)
    return _show(settings, ranks, alone, Console())


def _settings(steps: int, mesh: str, zero: int, out: Path) -> Settings:
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, found {steps}")
    asked = Mesh.parse(mesh).planned()
    parts, sizes = asked.data_size, dict(asked.sizes)
    if BATCH % parts:
        axes = " times ".join(axis for axis in reversed(DATA) if axis in sizes) or "dp"
        raise ValueError(f"--mesh: the batch of {BATCH} does not divide over {axes}={parts}; choose 1, 2, 4 or 8")
    return Settings(steps, sizes, zero, out)


# --- what both runs share -----------------------------------------------------------------------------


def demo_model() -> nn.Module:
    """The model, with the same float32 weights each time."""
    tiny = TINY["llama"]
    model: nn.Module = replace(tiny, sizes={**tiny.sizes, **SIZES}).build(dtype=torch.float32)
    return model


def demo_text() -> Tensor:
    """Bytes of the standard library's modules, in the order of their names: [N] int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for file in sorted(folder.glob("*.py"), key=lambda f: f.name):
        parts.append(file.read_bytes())
        if sum(map(len, parts)) >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()


def batches(steps: int) -> Iterator[dict[str, Tensor]]:
    """Seeded windows of the text, [BATCH, LENGTH]; the model shifts the labels itself."""
    source, generator = demo_text(), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(source) - LENGTH, (BATCH, 1), generator=generator)
        ids = source[starts + torch.arange(LENGTH)]
        yield {"input_ids": ids, "labels": ids}


def _optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    # with a smaller eps, rounding of gradients would move the embeddings of rare bytes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.01)
    warm = max(1, min(20, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    return optimizer, schedule


def _train(
    model: nn.Module, step: Callable[[dict[str, Tensor]], Tensor], steps: int, label: str, shown: bool
) -> DemoRun:
    """The training loop, with a progress bar on the rank that shows one."""
    run = DemoRun()
    optimizer, schedule = _optimizer(model, steps)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, disable=not shown)
    task = bar.add_task(label, total=steps, loss="-")
    for i, batch in enumerate(batches(steps)):
        start = time.perf_counter()
        loss = float(step(batch).detach())
        if i == 0:  # compiled now, which shows a progress of its own
            bar.start()
            run.memory["parameters"] = _held(model.parameters())
            run.memory["gradients"] = _held(p.grad for p in model.parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(loss)
        bar.update(task, advance=1, loss=f"{loss:.3f}")
    bar.stop()
    run.memory["optimizer state"] = _held(v for s in optimizer.state.values() for v in s.values())
    return run


def _held(tensors: Any) -> int:
    """Bytes of these tensors in this process."""
    locals_ = [local_tensor(t) for t in tensors if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in locals_)


# --- the two runs -------------------------------------------------------------------------------------


def _on_mesh(settings: Settings) -> DemoRun:
    """Runs on each rank."""
    torch.set_num_threads(1)
    mesh = init_mesh(device="cpu", **settings.mesh)
    model = parallelize(
        demo_model(), mesh, dump=str(settings.out / Path(REPORT).parent),
        zero=settings.zero, sequence_parallel=settings.mesh.get("tp", 1) > 1,
    )  # fmt: skip
    mine, parts = dp_rank_and_size(mesh)

    def step(batch: dict[str, Tensor]) -> Tensor:
        return model.train_step(**{k: v.chunk(parts)[mine] for k, v in batch.items()})

    label = f"{_words(settings.mesh)}, {math.prod(settings.mesh.values())} processes"
    run = _train(model, step, settings.steps, f"{label:<32}", shown=torch.distributed.get_rank() == 0)
    run.memory[SAVED] = memory(model.compiled()[0]).saved
    run.traffic = {
        key: type(t)(t.calls // settings.steps, t.bytes // settings.steps) for key, t in model.traffic().items()
    }
    return run


def _alone(settings: Settings) -> DemoRun:
    """The same training in this process, with transformers and autograd, without autopar."""
    torch.set_num_threads(1)  # like each of the ranks
    model, saved = demo_model(), dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def step(batch: dict[str, Tensor]) -> Tensor:
        if saved:
            loss: Tensor = model(**batch, use_cache=False).loss
        else:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss

    run = _train(model, step, settings.steps, f"{'one process':<32}", shown=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    run.memory[SAVED] = sum(size for pointer, size in saved.items() if pointer not in own)
    return run


def _words(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


# --- what is shown ------------------------------------------------------------------------------------


def _show(settings: Settings, ranks: Sequence[DemoRun], alone: DemoRun, console: Console) -> int:
    mesh, name = ranks[0], _words(settings.mesh)
    differences = [abs(a - b) for a, b in zip(mesh.losses, alone.losses, strict=True)]
    console.print()
    console.print(_losses(mesh, alone, name, differences))
    early = max(differences[:EARLY])
    console.print(
        f"largest difference: {early:.1e} in the first {EARLY} steps, {max(differences):.1e} in all steps\n"
        "(float32 sums in another order; training amplifies the last bit)\n"
    )
    console.print(_memory(ranks, alone))
    console.print(_traffic(mesh))
    console.print(
        f"median step: {_median(mesh.seconds):.3f} s on {len(ranks)} processes, {_median(alone.seconds):.3f} s in one "
        f"(one thread each; {os.cpu_count()} cores)\n{_shared_cores(len(ranks), os.cpu_count() or 1)}"
    )
    _write_csv(settings.out / "losses.csv", mesh, alone)
    files = [("every loss", "losses.csv"), ("every graph, the plan, the traffic", REPORT)]
    if _plot(settings.out / "loss.png", mesh, alone, name):
        files.insert(0, ("loss curves", "loss.png"))
    for what, file in files:
        console.print(f"{what + ':':<36} {settings.out / file}", highlight=False)
    if early > EARLY_TOLERANCE or max(differences) > TOLERANCE:
        console.print(f"[red]the two runs differ by more than {EARLY_TOLERANCE} at first or {TOLERANCE} later[/]")
        return 1
    return 0


def _shared_cores(ranks: int, cores: int) -> str:
    """Why ranks of one machine may be slower than one process."""
    if ranks <= cores:
        return ""
    return (
        f"{ranks} processes share {cores} cores here: they take turns, and communication adds to that. A mesh is "
        "faster if each rank has its own cores or GPU.\n"
    )


def _losses(mesh: DemoRun, alone: DemoRun, name: str, differences: Sequence[float]) -> Table:
    table = Table(title="Loss of the whole batch: mean over some steps", title_justify="left")
    for head in ("steps", name, "one process", "largest difference"):
        table.add_column(head, justify="right")
    steps = len(differences)
    width = max(1, -(-steps // ROWS))
    for start in range(0, steps, width):
        window = slice(start, min(start + width, steps))
        means = [sum(run.losses[window]) / (window.stop - start) for run in (mesh, alone)]
        table.add_row(
            f"{start + 1}-{window.stop}", *(f"{mean:.5f}" for mean in means), f"{max(differences[window]):.0e}"
        )
    return table


def _memory(ranks: Sequence[DemoRun], alone: DemoRun) -> Table:
    table = Table(title="Memory of a process", title_justify="left")
    table.add_column("")
    kinds = list(alone.memory)
    for kind in (*kinds, "together"):
        table.add_column(kind, justify="right")
    for label, run in [*((f"rank {i}", run) for i, run in enumerate(ranks)), ("one process", alone)]:
        sizes = [run.memory[kind] for kind in kinds]
        table.add_row(label, *(human_bytes(size) for size in (*sizes, sum(sizes))))
    return table


def _traffic(run: DemoRun) -> Table:
    table = Table(title="Sent by a rank, per step", title_justify="left")
    for head in ("axis", "collective", "calls", "bytes"):
        table.add_column(head, justify="left" if head in ("axis", "collective") else "right")
    for (axis, kind), traffic in sorted(run.traffic.items()):
        table.add_row(axis, kind, str(traffic.calls), human_bytes(traffic.bytes))
    return table


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _write_csv(path: Path, mesh: DemoRun, alone: DemoRun) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["step", "mesh", "one_process", "difference"])
        for i, (a, b) in enumerate(zip(mesh.losses, alone.losses, strict=True)):
            out.writerow([i + 1, f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.2e}"])


def _plot(path: Path, mesh: DemoRun, alone: DemoRun, name: str) -> bool:
    """Plot both curves and their difference; False if matplotlib, which only the demo uses, is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    steps = range(1, len(mesh.losses) + 1)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(steps, alone.losses, color="#f0a35e", linewidth=4, label="one process, transformers")
    top.plot(steps, mesh.losses, color="#1f4e79", linewidth=1.2, label=f"{name}, autopar")
    top.set_ylabel("loss of the whole batch (nats per byte)")
    top.set_title("A small Llama on the Python standard library's source code")
    top.legend(frameon=False)
    differences = [max(abs(a - b), 1e-8) for a, b in zip(mesh.losses, alone.losses, strict=True)]
    bottom.semilogy(steps, differences, color="#555555")
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
