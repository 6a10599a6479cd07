"""Optimizers of other libraries on meshes: five steps equal one process, or are refused. Anything else is an error.

outcomes(names, "zero3")   ->   {"pytorch_optimizer lamb": "", "pytorch_optimizer lomo": "optimizer: needs ..."}
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.optim.step_trials import way_of
from autopar.runtime.optim.whole_step import seed_all
from autopar.runtime.params.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "zero3": ({"dp": 2}, {"zero": 3}),
    "tp": ({"tp": 2}, {}),
    "zero1": ({"dp": 2}, {"zero": 1}),
}
TITLES = {"zero3": "dp=2, zero=3", "tp": "tp=2", "zero1": "dp=2, zero=1"}
REFUSAL = "ValueError: optimizer: needs one that steps "
STEPS, EXACT = 5, 1e-10

PYTORCH_OPTIMIZER = """
    a2grad accsgd adabelief adabound adadelta adafactor adagc adago adai adalite adamax adamc adamg adamod adamp
    adams adamuon adamw adamwsn adan adanorm adapnm adashift adasmooth adatam ademamix adopt aggmo aida alice alig amos
    ano apollo apollodqn avagrad bcos came conda dadaptadagrad dadaptadam dadaptadan dadaptlion dadaptsgd dash
    diffgrad dualadam emofact emolynx emonavi exadam fira flashadamw focus fromage ftrl galore grams
    gravity grokfastadamw kate kron lamb laprop lars lion madgrad magma mars msvag muon muonclip nero normuon
    novograd padam pid pnm prodigy qhadam qhm racs ranger ranger21 rose sara scalableshampoo schedulefreeadamw
    schedulefreeradam schedulefreesgd scion scionlight sgdp sgdsai sgdw shampoo signsgd simplifiedademamix sm3 soap spam
    splus srmm stableadamw stablespam swats tam tiger vsgd yogi adahessian sophiah
"""
TORCH_OPTIMIZER = """
    A2GradExp A2GradInc A2GradUni AccSGD AdaBelief AdaBound AdaMod Adafactor Adahessian AdamP AggMo Apollo DiffGrad LARS
    Lamb MADGRAD NovoGrad PID QHAdam QHM RAdam Ranger RangerQH RangerVA SGDP SGDW SWATS Shampoo Yogi
"""
OTHERS = {
    "lion_pytorch": ["Lion"],
    "prodigyopt": ["Prodigy"],
    "dadaptation": ["DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"],
    "schedulefree": ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"],
    "came_pytorch": ["CAME"],
    "madgrad": ["MADGRAD", "MirrorMADGRAD"],
    "grokadamw": ["GrokAdamW"],
}
NAMES = [
    *(f"pytorch_optimizer {name}" for name in PYTORCH_OPTIMIZER.split()),
    *(f"torch_optimizer {name}" for name in TORCH_OPTIMIZER.split()),
    *(f"{library} {name}" for library, names in OTHERS.items() for name in names),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer ranger21": {"num_iterations": 20},
    "pytorch_optimizer dash": {"block_size": 8},
    "torch_optimizer A2GradUni": {"lips": 10.0},
}
CLOSURES = {"pytorch_optimizer alig", "grokadamw GrokAdamW"}
SENSITIVE = {"pytorch_optimizer soap"}  # to the last bit of gradients: these are random numbers
MUONS = {"muon", "adamuon", "adago", "muonclip", "normuon"}


class Net(nn.Module):
    """A table, matrices, a convolution, vectors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.scale * self.down(torch.tanh(self.up(self.norm(h))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.roll(1, 1).flatten())


def plain() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net().double(), {"tokens": torch.randint(0, 16, (8, 4))}


def made(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    library, _, short = name.partition(" ")
    module: Any = importlib.import_module(library)
    kind = module.load_optimizer(short) if library == "pytorch_optimizer" else getattr(module, short)
    options = {"lr": 0.01, **OPTIONS.get(name, {})}
    groups: Any = parameters
    if library == "pytorch_optimizer" and short in MUONS:
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "use_muon": True},
            {"params": [p for p in parameters if p.dim() != 2], "use_muon": False},
        ]
    try:
        return kind(groups, **options)  # type: ignore[no-any-return]
    except TypeError:
        return kind(groups, **{n: x for n, x in options.items() if n != "lr"})  # type: ignore[no-any-return]


def trained(name: str, model: nn.Module, step: Callable[[], Tensor]) -> torch.optim.Optimizer:
    seed_all(1)
    optimizer = made(name, [*model.parameters()])
    if hasattr(optimizer, "train"):
        optimizer.train()

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            return step()

    for at in range(STEPS):
        model.zero_grad()
        if name in CLOSURES:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            step()
            if name in SENSITIVE:
                set_gradients(model, at)
            optimizer.step()
    return optimizer


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)


def alone(name: str) -> dict[str, Tensor]:
    """Weights after the steps of one process."""
    model, batch = plain()

    def step() -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    with quiet():
        trained(name, model, step)
    return model.state_dict()


@contextlib.contextmanager
def quiet() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def on_ranks(mesh: str, names: Iterable[str]) -> dict[str, Any]:
    """With what each optimizer steps, and weights after the steps, or its error."""
    sizes, options = MESHES[mesh]
    model, batch = plain()
    over = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(over)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    parallel = autopar.parallelize(model, over, lift_to_float64=True, example_batch=mine, **options)
    start, found = {n: x.clone() for n, x in parallel.full_state_dict().items()}, {}
    for name in names:
        parallel.load_state_dict(start)
        try:
            with quiet():
                optimizer = trained(name, parallel, lambda: parallel.train_step(**mine))
        except Exception as error:
            found[name] = "", f"{type(error).__name__}: {error}"
        else:
            way = way_of(optimizer, lambda p: isinstance(p, ShardedTensor)).way
            found[name] = way.value if way is not None else "", dict(parallel.full_state_dict())
    return found


@dataclass(frozen=True)
class Outcome:
    """``words`` of a refusal; else ``way``: with what the optimizer steps."""

    words: str = ""
    way: str = ""


def outcomes(names: list[str], mesh: str) -> dict[str, Outcome]:
    """By optimizer. Raises AssertionError unless each makes five steps of one process, or is refused."""
    said: dict[str, Outcome] = {}
    for found in run_ranks(2, on_ranks, mesh, names, timeout=400):
        for name, (way, result) in found.items():
            one = Outcome(result) if isinstance(result, str) else Outcome(difference(result, alone(name)), way)
            assert said.setdefault(name, one) == one, (name, said[name], one)
    wrong = {n: one.words for n, one in said.items() if one.words and not one.words.startswith(REFUSAL)}
    assert not wrong, wrong
    return said


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """In words, if there is one."""
    for name, x in expected.items():
        worst = float((found[name] - x).abs().max() / x.abs().max().clamp_min(1e-30))
        if not worst < EXACT:
            return f"{name} differs by {worst:.1e}"
    return ""
