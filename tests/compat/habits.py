"""What users do to a model, a parameter, an optimizer, around and between steps: one line each.

A habit is a function of a `Run`, alike for plain torch and for a mesh. It runs at its time:

    before     on the plain model, before `parallelize` (on one process: before the first step)
    between    after the first of two training steps
    loop       in place of the second step: forward, backward, whatever goes with it

Each must then have torch's effect: the same losses and, after two steps, the same parameters, buffers, gradients and
optimizer state. Or it is refused, in words that the line quotes. A step is `train_step`, or a forward and a backward by
themselves: a habit says in which of these ways it is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.compat.habit_models import batch, make

STEP, PHASES = "train_step", "model(**batch), backward()"  # the ways to step


@dataclass
class Run:
    """One side: the model (plain, or on a mesh), its optimizer, this rank's part of a batch, losses so far.

    phases: whether steps on a mesh are a forward and a backward by themselves.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    part: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    losses: list[float] = field(default_factory=list)
    on_mesh: bool = False
    phases: bool = False

    def batch(self, step: int = 1) -> dict[str, Tensor]:
        return self.part(batch(step))

    def forward(self, step: int = 1) -> Any:
        out = self.model(**self.batch(step))
        self.losses.append(float(out["loss"].detach()))
        return out

    def train_step(self, step: int = 0) -> None:
        """Forward and backward, then the optimizer."""
        if self.on_mesh and not self.phases:
            self.losses.append(float(self.model.train_step(**self.batch(step))))
        else:
            self._plain(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _plain(self, step: int) -> None:
        loss = self.model(**self.batch(step))["loss"]
        self.losses.append(float(loss.detach()))
        loss.backward()

    def whole(self, x: Tensor) -> Tensor:
        """A tensor of the model, whole."""
        return x.full_tensor() if hasattr(x, "full_tensor") else x


@dataclass(frozen=True)
class Habit:
    """``refused``: a pattern of the error's words, where autopar refuses what torch does. ``tolerance``: absolute.
    ``make``: the model, whose forward takes and returns what `habit_models.Model` does. ``ways``: to step."""

    what: str
    when: str
    do: Callable[[Any], Any]
    refused: str = ""
    tolerance: float = 1e-10
    make: Callable[[], Any] = make
    ways: tuple[str, ...] = (STEP,)


HABITS: list[Habit] = []


def habit(when: str, what: str, do: Callable[[Any], Any], refused: str = "", tolerance: float = 1e-10) -> None:
    HABITS.append(Habit(what, when, do, refused, tolerance))


def quiet(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(fn)


def every(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, kind)]


def put(obj: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(obj, name, value)


# --- modes ------------------------------------------------------------------------------------------------

for when in ("before", "between"):
    habit(when, "model.eval()", lambda m: m.eval())
    habit(when, "model.bn.eval()", lambda m: m.bn.eval())
    habit(when, "model.block.eval()", lambda m: m.block.eval())
    habit(when, "model.train(False); model.block.train()", lambda m: (m.train(False), m.block.train()))
    habit(when, "model.eval(); model.train()", lambda m: (m.eval(), m.train()))
    habit(when, "every BatchNorm1d of model.modules(): .eval()", lambda m: [x.eval() for x in every(m, nn.BatchNorm1d)])
    habit(when, "model.bn.training = False", lambda m: put(m.bn, training=False))
    habit(when, "model.apply(lambda m: m.eval())", lambda m: m.apply(lambda x: x.eval()))

    # --- frozen parameters
    habit(
        when, "model.requires_grad_(False) but for scale", lambda m: (m.requires_grad_(False), m.scale.requires_grad_())
    )
    habit(when, "model.first.requires_grad_(False)", lambda m: m.first.requires_grad_(False))
    habit(when, "model.scale.requires_grad_(False)", lambda m: m.scale.requires_grad_(False))
    habit(when, "model.scale.requires_grad = False", lambda m: put(m.scale, requires_grad=False))
    habit(when, "model.last.weight.requires_grad_(False) (tied)", lambda m: m.last.weight.requires_grad_(False))
    habit(when, "frozen, then unfrozen", lambda m: (m.first.requires_grad_(False), m.first.requires_grad_(True)))
    habit(when, "every bias frozen, by name", lambda m: [
        p.requires_grad_(False) for n, p in m.named_parameters() if n.endswith("bias")])  # fmt: skip
    habit(when, "frozen by get_parameter", lambda m: m.get_parameter("block.fc.weight").requires_grad_(False))

    # --- values of parameters
    habit(when, "no_grad: p.mul_(0.5)", quiet(lambda m: m.scale.mul_(0.5)))
    habit(when, "no_grad: p.add_(1) of all", quiet(lambda m: [p.add_(0.1) for p in m.parameters()]))
    habit(when, "no_grad: p.clamp_(-1, 1) of all", quiet(lambda m: [p.clamp_(-0.1, 0.1) for p in m.parameters()]))
    habit(when, "no_grad: p.zero_()", quiet(lambda m: m.block.fc.bias.zero_()))
    habit(when, "no_grad: p.fill_(2)", quiet(lambda m: m.scale.fill_(2)))
    habit(when, "no_grad: p.copy_(p * 2)", quiet(lambda m: m.scale.copy_(m.scale * 2)))
    habit(when, "p.data.mul_(0.5)", lambda m: m.scale.data.mul_(0.5))
    habit(when, "p.data.zero_()", lambda m: m.block.fc.bias.data.zero_())
    habit(when, "p.data.copy_(p.data + 1)", lambda m: m.scale.data.copy_(m.scale.data + 1))
    habit(when, "p.detach().mul_(2)", lambda m: m.scale.detach().mul_(2))
    habit(when, "nn.init.zeros_(p)", lambda m: nn.init.zeros_(m.block.fc.weight))
    habit(when, "nn.init.constant_(p, 0.3)", lambda m: nn.init.constant_(m.first.bias, 0.3))
    habit(when, "nn.init.ones_(p)", lambda m: nn.init.ones_(m.bn.weight))
    habit(when, "model.apply(init) of the Linears", lambda m: m.apply(
        lambda x: nn.init.constant_(x.weight, 0.1) if isinstance(x, nn.Linear) else None))  # fmt: skip
    habit(when, "load_state_dict of changed weights", lambda m: m.load_state_dict(
        {k: v * 0.5 for k, v in m.state_dict().items() if v.is_floating_point()}, strict=False))  # fmt: skip
    habit(
        when,
        "torch._foreach_mul_(list(parameters), 0.5)",
        quiet(lambda m: torch._foreach_mul_(list(m.parameters()), 0.5)),
    )

    # --- buffers
    habit(when, "buffer.fill_(1)", lambda m: m.mean.fill_(1))
    habit(when, "model.mean = torch.ones(6)", lambda m: put(m, mean=torch.ones(6, dtype=torch.float64)))
    habit(when, "model.mean.data = ...", lambda m: put(m.mean, data=torch.ones(6, dtype=torch.float64)))
    habit(when, "model.bn.running_mean.zero_()", lambda m: m.bn.running_mean.zero_())
    habit(when, "model.bn.reset_running_stats()", lambda m: m.bn.reset_running_stats())
    habit(when, "model.bn.reset_parameters()", lambda m: m.bn.reset_parameters())
    habit(when, "model.bn.momentum = 0.5", lambda m: put(m.bn, momentum=0.5))
    habit(when, "model.bn.momentum = None", lambda m: put(m.bn, momentum=None))
    habit(when, "model.bn.eps = 0.1", lambda m: put(m.bn, eps=0.1))
    habit(when, "model.bn.track_running_stats = False", lambda m: put(m.bn, track_running_stats=False))
    habit(when, "register_buffer of a new buffer", lambda m: m.register_buffer("more", torch.ones(3)))

    # --- attributes and modules
    habit(when, "model.block.gain = 3.0", lambda m: put(m.block, gain=3.0))
    habit(when, "model.config.gain = 3.0 (in place)", lambda m: put(m.config, gain=3.0))
    habit(when, "model.config.squash = False (a branch)", lambda m: put(m.config, squash=False))
    habit(when, "setattr(model, 'note', 1): nobody reads it", lambda m: put(m, note=1))
    habit(when, "model.act = nn.GELU()", lambda m: put(m, act=nn.GELU()))
    habit(when, "model.add_module('act', nn.Tanh())", lambda m: m.add_module("act", nn.Tanh()))
    habit(when, "model.set_submodule('act', nn.Tanh())", lambda m: m.set_submodule("act", nn.Tanh()))
    habit(when, "model.block = nn.Identity()", lambda m: put(m, block=nn.Identity()))
    habit(when, "model.block.fc = nn.Sequential(model.block.fc)", lambda m: put(m.block, fc=nn.Sequential(m.block.fc)),
          "" if when == "before" else "was added to the model after parallelize")  # fmt: skip
    habit(when, "model.zero_grad()", lambda m: m.zero_grad())
    habit(when, "model.zero_grad(set_to_none=False)", lambda m: m.zero_grad(set_to_none=False))
    habit(when, "model.float().double()", lambda m: m.float().double())
    habit(when, "model.float(): another dtype", lambda m: m.float(), tolerance=1e-4)
    habit(when, "model.to('cpu')", lambda m: m.to("cpu"))
    habit(when, "model.cpu()", lambda m: m.cpu())
    habit(when, "model.named_parameters(): names and shapes", lambda m: [
        (n, tuple(p.shape), p.numel(), p.dim()) for n, p in m.named_parameters()])  # fmt: skip
    habit(when, "model.state_dict(): names", lambda m: [k for k in m.state_dict() if "extra" not in k])
    habit(
        when,
        "names of modules and buffers",
        lambda m: [[n for n, _ in m.named_modules()], [n for n, _ in m.named_buffers()]],
    )
    habit(when, "sum(p.numel() for p in parameters)", lambda m: sum(p.numel() for p in m.parameters()))
    habit(
        when,
        "attributes of submodules are read",
        lambda m: (m.first.in_features, m.bn.eps, m.block.gain, m.config.gain),
    )
    habit(
        when, "isinstance(model.first, nn.Linear)", lambda m: isinstance(m.first, nn.Linear) and type(m.block).__name__
    )
    habit(when, "model.last.weight is model.tied.weight", lambda m: m.last.weight is m.tied.weight)
    habit(when, "repr of a submodule", lambda m: repr(m.block))
    habit(when, "p.norm() of all", lambda m: [round(float(full(p.detach().norm())), 12) for p in m.parameters()])
    habit(when, "p.sum(), p.abs().max()", lambda m: [round(float(full(x)), 12) for p in m.parameters() for x in (
        p.detach().sum(), p.detach().abs().max())])  # fmt: skip


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def again(m: Any) -> nn.Parameter:
    return nn.Parameter(m.scale.detach().clone() * 2)


LAID = "is not laid out on the mesh"
ADDED = "was added to the model after parallelize"

# --- before: what the structure is made of --------------------------------------------------------------------

habit("before", "nn.Dropout(p) of 0", lambda m: put(m.block.drop, p=0.0))
habit("before", "model.scale = nn.Parameter(...)", lambda m: put(m, scale=again(m)))
habit("before", "p.data = other", lambda m: put(m.scale, data=m.scale.data * 2))
habit(
    "before",
    "register_parameter of an unused one",
    lambda m: m.register_parameter("more", nn.Parameter(torch.ones(3).double())),
)
habit("before", "model.first.bias = None", lambda m: put(m.first, bias=None))
habit("before", "ties untied", lambda m: put(m.tied, weight=nn.Parameter(m.tied.weight.detach().clone())))
habit("before", "more ties: block.fc.bias = bn.bias", lambda m: put(m.block.fc, bias=m.bn.bias))
habit("before", "nn.init.normal_ after manual_seed", lambda m: (torch.manual_seed(1), nn.init.normal_(m.first.weight)))
habit("before", "parametrizations.weight_norm", lambda m: nn.utils.parametrizations.weight_norm(m.first))
habit("before", "register_parametrization of a weight", lambda m: nn.utils.parametrize.register_parametrization(
    m.block.fc, "weight", nn.Tanh()))  # fmt: skip
habit("before", "parametrized, then removed", lambda m: (
    nn.utils.parametrize.register_parametrization(m.block.fc, "weight", nn.Tanh()),
    nn.utils.parametrize.remove_parametrizations(m.block.fc, "weight")))  # fmt: skip
habit("before", "prune.l1_unstructured", lambda m: prune.l1_unstructured(m.block.fc, "weight", 0.5))
habit(
    "before",
    "a forward and backward: .grad is there",
    lambda m: m(**batch(5))["loss"].backward(),
    "has a gradient already",
)
habit(
    "before",
    "a forward, backward and zero_grad()",
    lambda m: (m(**batch(5))["loss"].backward(), m.zero_grad()) and None,
)
habit("before", "del model.bn.num_batches_tracked", lambda m: m.bn.register_buffer("num_batches_tracked", None))

# --- between: parameters that are replaced --------------------------------------------------------------------

habit(
    "between",
    "model.scale = nn.Parameter(torch.ones(4))",
    lambda m: put(m, scale=nn.Parameter(torch.ones(4).double())),
    LAID,
)
habit("between", "model.scale = nn.Parameter(2 * model.scale)", lambda m: put(m, scale=again(m)))
habit("between", "p.data = p.data * 2", lambda m: put(m.scale, data=m.scale.data * 2))
habit("between", "p.data = torch.ones(4)", lambda m: put(m.scale, data=torch.ones(4).double()))
habit(
    "between",
    "register_parameter of a new one",
    lambda m: m.register_parameter("more", nn.Parameter(torch.ones(3))),
    ADDED,
)
habit("between", "model.new = nn.Linear(2, 2)", lambda m: put(m, new=nn.Linear(2, 2)), ADDED)
habit("between", "model.first = nn.Linear(4, 6)", lambda m: put(m, first=nn.Linear(4, 6).double()), LAID)
habit("between", "model.first.bias = None", lambda m: put(m.first, bias=None))
habit("between", "del model.block", lambda m: delattr(m, "block"), "a Model has no block")
habit(
    "between",
    "ties untied by a copy",
    lambda m: put(m.tied, weight=nn.Parameter(m.tied.weight.detach().clone())),
    "were one parameter",
)
habit("between", "register_parametrization", lambda m: nn.utils.parametrize.register_parametrization(
    m.block.fc, "weight", nn.Tanh()), ADDED)  # fmt: skip
habit("between", "no_grad: p.copy_(a plain tensor)", quiet(lambda m: m.scale.copy_(torch.ones(4).double())))
habit("between", "copy.deepcopy(model)", lambda m: __import__("copy").deepcopy(m) and None)
habit("between", "pickle.dumps(model)", lambda m: __import__("pickle").dumps(m), "cannot be pickled, nor copied")
habit(
    "between", "model.forward = ...", lambda m: put(m, forward=lambda **b: None), "belongs to autopar and cannot be set"
)
habit("between", "model.share_memory()", lambda m: m.share_memory(), "is in the memory of its own rank")
habit("between", "model.half().double()", lambda m: m.half().double())
habit("between", "model.bn.to('cpu')", lambda m: m.bn.to("cpu"))
