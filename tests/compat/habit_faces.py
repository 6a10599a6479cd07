"""Habits with the face of a model: what its class makes of torch's methods, tags of parameters, states that modules say
themselves, and handles on the model that were there before `parallelize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from tests.compat.habit_models import Model, batch, make
from tests.compat.habits import PHASES, STEP, Habit, every, put, quiet

FACES: list[Habit] = []
BOTH = (STEP, PHASES)


def of(
    kind: type[Model] | Callable[[], Model],
    what: str,
    do: Callable[[Any], Any],
    refused: str = "",
    when: str = "between",
    ways: tuple[str, ...] = (STEP,),
) -> None:
    """A habit with a model of another class, or one that is made."""

    def made() -> Any:
        torch.manual_seed(0)
        return kind().double()

    FACES.append(Habit(what, when, do, refused, make=made, ways=ways))


def whole_state(m: Any) -> Any:
    """Whole tensors by name, on a mesh or not."""
    return m.full_state_dict() if hasattr(m, "full_state_dict") else m.state_dict()


def nothing(_: Any) -> None:
    return None


# --- what the model's class makes of torch's methods ------------------------------------------------------------


class FrozenNorm(Model):
    """Batch norm stays in eval mode, as detectors have it."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.bn.eval()
        return self

    def eval(self) -> Any:
        super().eval()
        self.block.train()
        return self


class OwnLists(Model):
    """Hands out what trains."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for name, p in super().named_parameters() if "bias" not in name)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (x for name, x in super().named_buffers() if "bn" not in name)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.first.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        fn(self.first)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        return super().get_submodule({"head": "last"}.get(target, target))


class Moved(Model):
    """Notes where it was moved."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves = [*getattr(self, "moves", ()), "to"]
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.moves = [*getattr(self, "moves", ()), "applied"]
        return super()._apply(fn, recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.moves = [*getattr(self, "moves", ()), "zeroed"]
        super().zero_grad(set_to_none)


class Container(Model):
    """Is asked for its parts, calls itself, and has attributes that are no attributes."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> nn.Module:
        return (self.first, self.bn, self.block)[i]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self.first, self.bn, self.block))

    def __contains__(self, x: Any) -> bool:
        return any(x is y for y in self)

    def __str__(self) -> str:
        return "a container"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        return {**out, "loss": out["loss"] * 2}

    def __getattr__(self, name: str) -> Any:
        return 42 if name == "answer" else super().__getattr__(name)

    @property
    def gain(self) -> float:
        return self.block.gain

    @gain.setter
    def gain(self, value: float) -> None:
        self.block.gain = value

    def _scaled(self, by: float) -> None:
        with torch.no_grad():
            self.scale.mul_(by)


of(FrozenNorm, "train() of the class keeps batch norm in eval mode", lambda m: (
    m.train() is m, m.bn.training, m.training), ways=BOTH)  # fmt: skip
of(FrozenNorm, "eval() of the class", lambda m: (m.eval() is m, m.bn.training, m.block.training, m.training), ways=BOTH)
of(OwnLists, "parameters() of the class leaves out biases", lambda m: len(list(m.parameters())), ways=BOTH)
of(OwnLists, "buffers() of the class", lambda m: len(list(m.buffers())))
of(OwnLists, "requires_grad_() of the class", lambda m: m.requires_grad_(False) is m, ways=BOTH)
of(OwnLists, "apply() of the class", lambda m: m.apply(lambda x: nn.init.ones_(x.weight)) is m)
of(OwnLists, "get_submodule() of the class", lambda m: m.get_submodule("head") is m.last)
of(Moved, "to() of the class", lambda m: (m.to("cpu") is m, [x for x in m.moves if x == "to"]))
of(Moved, "_apply() of the class", lambda m: (put(m, moves=[]), m.half().double() is m, m.moves)[1:])
of(Moved, "zero_grad() of the class", lambda m: (m.zero_grad(), m.moves[-1])[1])
of(Container, "len(model), model[0], for x in model, x in model", lambda m: (
    len(m), m[0].in_features, [type(x).__name__ for x in m], m.bn in m, m.act in m))  # fmt: skip
of(Container, "str(model) of the class", str)
of(Container, "__call__ of the class", nothing, ways=BOTH)
of(Container, "__getattr__ of the class", lambda m: m.answer)
of(Container, "a property with a setter", lambda m: (put(m, gain=3.0), m.block.gain, m.gain)[1:], ways=BOTH)
of(Container, "a method whose name begins with _", lambda m: m._scaled(0.5), ways=BOTH)
of(Container, "an attribute whose name begins with _", lambda m: (put(m, _note=1), m._note)[1])

UNDER_TORCHS_NAME = "to list every module, parameter and buffer under its name in torch"


def listed(**methods: Any) -> type[Model]:
    return type("Listed", (Model,), methods)


def without_bias(self: Any, *args: Any, **how: Any) -> Any:
    return ((n, p) for n, p in Model.named_parameters(self, *args, **how) if "bias" not in n)


of(listed(named_parameters=without_bias), "named_parameters() of the class leaves some out", nothing, UNDER_TORCHS_NAME)
of(listed(named_modules=lambda self, *a, **k: iter([("", self)])), "named_modules() of the class leaves some out",
   nothing, UNDER_TORCHS_NAME)  # fmt: skip
of(listed(parameters=lambda self, recurse=True: iter([{"params": [self.scale]}])), "parameters() gives groups", nothing,
   r"needs tensors from .*parameters|'dict' object has no attribute")  # fmt: skip

# --- tags ------------------------------------------------------------------------------------------------------------


class Tagged(Model):
    """Parameters say how they are to be trained, and the forward reads one tag."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.gain = 2.0  # type: ignore[attr-defined]
        self.scale.of = [self.first.weight, self.block]  # type: ignore[attr-defined]
        self.last.weight._optim = {"lr": 0.001}  # type: ignore[attr-defined]
        for norm in every(self, nn.BatchNorm1d):
            norm.weight._no_weight_decay = norm.bias._no_weight_decay = True

    def double(self) -> Any:
        super().double()
        self.mean.kind = "statistics"  # type: ignore[attr-defined]  # torch's casts replace buffers
        return self

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, target)
        return {**out, "loss": out["loss"] * getattr(self.scale, "gain", 1.0)}


class ByTags(Tagged):
    """The optimizer gets what is not left out by a tag."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for _, p in super().named_parameters() if not getattr(p, "_no_weight_decay", False))


class Marked(nn.Parameter):
    """A class of its own."""


def tagged(m: Any) -> Any:
    return [n for n, p in m.named_parameters() if getattr(p, "_no_weight_decay", False)], m.tied.weight._optim["lr"]


of(Tagged, "p._no_weight_decay, p._optim, of tied weights, too", tagged)
of(Tagged, "a tag of a buffer", lambda m: m.mean.kind)
of(Tagged, "a tag that the forward reads", nothing, ways=BOTH)
of(Tagged, "a tag that the forward reads is changed", lambda m: put(m.scale, gain=3.0), ways=BOTH)
of(Tagged, "a tag that the forward reads is deleted", lambda m: delattr(m.scale, "gain"), ways=BOTH)
of(Tagged, "a tag with a parameter and a module in it", lambda m: (
    m.scale.of[0] is m.first.weight, m.scale.of[1] is m.block))  # fmt: skip
of(Tagged, "tags behind model.half().double()", lambda m: (m.half().double(), tagged(m), m.scale.gain)[1:], ways=BOTH)
of(Tagged, "tags behind load_state_dict", lambda m: (m.load_state_dict(whole_state(m)), tagged(m))[1])
of(ByTags, "parameters of an optimizer chosen by tags", nothing, ways=BOTH)
FACES.append(Habit("p.tag = 1, read between steps", "between", lambda m: (put(m.scale, tag=1), m.scale.tag)[1]))
FACES.append(Habit("a subclass of nn.Parameter", "before", lambda m: put(m, scale=Marked(m.scale.data)),
                   "needs plain parameters and buffers, found parameter scale, a Marked"))  # fmt: skip

# --- states that modules say themselves ------------------------------------------------------------------------------


def renamed(_m: Any, state: dict[str, Any], prefix: str, _notes: Any) -> None:
    for name in [k for k in state if k.startswith(prefix) and "_extra" not in k]:
        state[f"{prefix}net.{name.removeprefix(prefix)}"] = state.pop(name)


def back(_m: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in list(state):
        if name.startswith(f"{prefix}net."):
            state[prefix + name.removeprefix(f"{prefix}net.")] = state.pop(name)


class Renamed(Model):
    """Another layout in files."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(renamed)
        self.register_load_state_dict_pre_hook(back)


class Counting(nn.Linear):
    """Has a state beside tensors."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"] + 1


class Stateful(Model):
    """Says itself what its state is, all over."""

    def __init__(self) -> None:
        super().__init__()
        self.block.fc = Counting(6, 6)

    def get_extra_state(self) -> Any:
        return "of the model"

    def set_extra_state(self, state: Any) -> None:
        self.got = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found["version"] = torch.ones(1)
        return found

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v for k, v in state.items() if k != "version"}, strict)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "scale"] = state[prefix + "scale"] * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state, prefix + "scale": state[prefix + "scale"] / 2}, prefix, *rest)


def reloaded(m: Any) -> Any:
    """The state out, doubled, and in."""
    state = {k: v * 2 if isinstance(v, Tensor) else v for k, v in whole_state(m).items()}
    m.load_state_dict(state)
    return sorted(state), getattr(m, "got", None), getattr(m.block.fc, "seen", 0)


of(Renamed, "hooks of a state dict rename, state_dict()", lambda m: [k for k in m.state_dict() if "extra" not in k])
of(Renamed, "hooks of a state dict rename, out and in", reloaded, ways=BOTH)
of(Stateful, "get_extra_state, state_dict() and load_state_dict() of the class, out and in", reloaded, ways=BOTH)
of(Stateful, "extra states in state_dict()", lambda m: (
    m.state_dict()["_extra_state"], m.state_dict()["block.fc._extra_state"]["seen"]))  # fmt: skip
FACES.append(Habit("register_load_state_dict_post_hook", "between", lambda m: (
    m.register_load_state_dict_post_hook(lambda x, keys: put(x, late=len(keys.missing_keys))),
    m.load_state_dict(whole_state(m)), m.late)[2]))  # fmt: skip
FACES.append(Habit("register_state_dict_pre_hook", "between", lambda m: (
    m.register_state_dict_pre_hook(lambda x, *_: put(x, asked=1)), m.state_dict(), m.asked)[2]))  # fmt: skip

# --- handles on the original ------------------------------------------------------------------------------------------

_KEPT: list[Any] = []


def kept() -> Model:
    """A model that somebody has a handle on."""
    _KEPT[:] = [make()]
    return _KEPT[0]


def handle(what: str, do: Callable[[Any], Any], refused: str = "", ways: tuple[str, ...] = (STEP,)) -> None:
    """Done to the model as it was before `parallelize`."""
    FACES.append(
        Habit(f"old handle: {what}", "between", lambda _: (do(_KEPT[0]), None)[1], refused, make=kept, ways=ways)
    )


def original(text: str) -> str:
    return f"parallelize: {text} on the original model after parallelize"


handle("model.eval()", lambda m: m.eval(), original("attribute training was set to False"), BOTH)
handle("backbone.eval()", lambda m: m.block.eval(), original("attribute block.training was set to False"), BOTH)
handle("bn.training = False", lambda m: put(m.bn, training=False), original("attribute bn.training was set to False"))
handle("eval(), then train()", lambda m: (m.eval(), m.train()), ways=BOTH)
handle("backbone.requires_grad_(False)", lambda m: m.block.requires_grad_(False),
       original("requires_grad of block.fc.weight was set to False"), BOTH)  # fmt: skip
handle("for p in backbone.parameters(): p.requires_grad = False", lambda m: [
    put(p, requires_grad=False) for p in m.first.parameters()], original("requires_grad of first.weight was set to False"))  # fmt: skip
WRITTEN = original("values of first.weight were written")
handle("backbone.load_state_dict(state)", lambda m: m.first.load_state_dict(
    {k: v * 2 for k, v in m.first.state_dict().items()}), WRITTEN, BOTH)  # fmt: skip
handle("nn.init.normal_(weight)", lambda m: nn.init.normal_(m.first.weight), WRITTEN)
handle("weight.data.mul_(2)", lambda m: m.first.weight.data.mul_(2), WRITTEN, BOTH)
handle("weight.data = other", lambda m: put(m.first.weight, data=torch.ones(6, 4).double()), WRITTEN)
handle("no_grad: weight.mul_(0.9).add_(other), an average", quiet(
    lambda m: m.first.weight.mul_(0.9).add_(torch.ones(6, 4).double())), WRITTEN, BOTH)  # fmt: skip
handle("vector_to_parameters", lambda m: vector_to_parameters(
    torch.ones(sum(p.numel() for p in m.parameters())).double(), m.parameters()),
    original("values of scale were written"))  # fmt: skip
handle("model.scale = nn.Parameter(...)", lambda m: put(m, scale=nn.Parameter(m.scale.data * 2)),
       original("parameter scale was replaced"))  # fmt: skip
handle("first.bias = None", lambda m: put(m.first, bias=None), original("parameter first.bias was removed"))
handle("block.drop.p = 0.5", lambda m: put(m.block.drop, p=0.5), original("attribute block.drop.p was set to 0.5"))
handle("block.gain = 2.0", lambda m: put(m.block, gain=2.0), original("attribute block.gain was set to 2.0"), BOTH)
handle("model.act = nn.GELU()", lambda m: put(m, act=nn.GELU()), original("module act was replaced"))
handle("block.forward = fn", lambda m: put(m.block, forward=lambda x: x), original("attribute block.forward was set"))
handle("block.register_forward_hook", lambda m: m.block.register_forward_hook(lambda _m, _x, out: out * 2),
       original("hooks of block were registered or removed"))  # fmt: skip
handle("p.register_hook", lambda m: m.scale.register_hook(lambda g: g * 2),
       original("a gradient hook of scale was registered"))  # fmt: skip
handle("p._no_weight_decay = True", lambda m: put(m.scale, _no_weight_decay=True),
       original("attribute _no_weight_decay of scale was set"))  # fmt: skip
handle(
    "model.mean = torch.ones(6)", lambda m: put(m, mean=torch.ones(6).double()), original("buffer mean was replaced")
)
handle(
    "bn.reset_running_stats()", lambda m: m.bn.reset_running_stats(), original("values of bn.running_mean were written")
)


class Pure(Model):
    """A forward leaves nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.LayerNorm(6)  # type: ignore[assignment]
        self.config.squash = False

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.block(self.bn(self.first(x)))) * self.scale
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def pure() -> Model:
    torch.manual_seed(0)
    _KEPT[:] = [Pure().double()]
    return _KEPT[0]


FACES.append(Habit("old handle: reading, a forward without gradients", "between", quiet(
    lambda _: (_KEPT[0](**batch(3)), len(_KEPT[0].state_dict()))[1]), make=pure, ways=BOTH))  # fmt: skip
