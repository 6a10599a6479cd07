"""Habits of scripts and papers' code: methods and classes that are set between steps, functions that hold the model,
operators in place, complex numbers, and what a forward calls that no graph holds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from tests.compat.habit_models import Block, Model
from tests.compat.habits import PHASES, STEP, Habit

SCRIPTS: list[Habit] = []


def of(kind: type[nn.Module], what: str, do: Callable[[Any], Any], refused: str = "", when: str = "between") -> None:
    """A habit with a model of another class, in both ways to step."""

    def made() -> Any:
        torch.manual_seed(0)
        return kind().double()

    SCRIPTS.append(Habit(what, when, do, refused, make=made, ways=(STEP, PHASES)))


def written(body: Callable[[Model, Tensor], Tensor]) -> type[Model]:
    """A model that computes ``body`` of itself and the output of its first layer, and then goes on."""

    class Written(Model):
        def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
            return super().forward(body(self, self.first(x))[:, :4], target)

    return Written


def nothing(_: Any) -> None:
    return None


# --- classes and methods that are set, functions that hold the model ---------------------------------------------


class Louder(Block):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(Model):
    def shift(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return super().forward(x + self.shift(self.first(x))[:, :4], target)


def by_block(self: Any, h: Tensor) -> Tensor:
    return torch.sin(self.block.fc(h))


class Global(Model):
    """A loss that reaches the model by another name."""

    names: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        Global.names = {}

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, target)
        return {**out, "loss": out["loss"] + sum(m.scale.pow(2).sum() for m in self.names.values())}


def named_elsewhere(m: Any) -> None:
    Global.names = {"model": m}


def louder(m: Any) -> None:
    m.block.__class__ = Louder


def method_of_model(m: Any) -> None:
    m.shift = types.MethodType(by_block, m)


def closure_with_model(m: Any) -> None:
    m.block.forward = lambda x: m.act(m.block.fc(x))


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.log()


class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.block.fc.weight, 0.3)
        parametrize.register_parametrization(self.block.fc, "weight", Positive())


def weight_assigned(m: Any) -> None:
    m.block.fc.weight = torch.linspace(0.1, 1.0, 36, dtype=torch.float64).view(6, 6)


of(Parametrized, "layer.weight = value, where weight is parametrized", weight_assigned)
of(Model, "model.block.__class__ = another class", louder)
of(Global, "Class.names['model'] = model, which the forward reads", named_elsewhere, "through a global variable or a")
of(Shifted, "model.method = MethodType(f, model)", method_of_model)
of(Model, "model.block.forward = a function that calls model.act and model.block.fc", closure_with_model)

# --- operators in place, whose other form has another name; complex numbers --------------------------------------

of(written(lambda m, h: (h * 1).pow_(2)), "h.pow_(2) in a forward", nothing, when="before")
of(written(lambda m, h: (h * 1).float_power_(2)), "h.float_power_(2) in a forward", nothing, when="before")
of(written(lambda m, h: (h * 1).ldexp_(torch.ones(()))), "h.ldexp_(1) in a forward", nothing, when="before")
of(written(lambda m, h: (h * 1j).exp().imag), "(h * 1j).exp() in a forward", nothing, when="before")
of(written(lambda m, h: (h / (1 + 2j)).abs()), "h / (1 + 2j) in a forward", nothing, when="before")
of(written(lambda m, h: (1j - h * (2 - 1j)).abs()), "1j - h * (2 - 1j) in a forward", nothing, when="before")

# --- what no graph holds ----------------------------------------------------------------------------------------


def packed(m: Model, h: Tensor) -> Tensor:
    lengths = torch.full((len(h),), 4)
    return pack_padded_sequence(h[..., None], lengths, batch_first=True).data.view(len(h), -1)


def sorted_by_numpy(m: Model, h: Tensor) -> Tensor:
    return h[torch.from_numpy(h.detach().numpy()[:, 0].argsort())]


of(
    written(packed),
    "pack_padded_sequence in a forward",
    nothing,
    "pack_padded_sequence makes data-dependent sizes",
    "before",
)
of(written(lambda m, h: vmap(jacrev(m.block))(h).sum(-1)), "jacrev in a forward", nothing, "jacrev cannot", "before")
of(written(lambda m, h: vmap(jacfwd(m.block))(h).sum(-1)), "jacfwd in a forward", nothing, "vmap around", "before")
of(written(sorted_by_numpy), "h.detach().numpy() in a forward", nothing, "reads the value of a tensor", "before")
