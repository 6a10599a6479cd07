"""Habits with hooks, casts, wrappers, copies, and other helpers of torch. `do` takes the model or a `Run`, by its time."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from tests.compat.habit_loops import backward, plain
from tests.compat.habits import Habit, Run, full

OTHERS: list[Habit] = []
BACKWARD = "hooks: a parallel model has its own backward|has a backward hook"


def loop(what: str, do: Callable[[Run], Any], refused: str = "") -> None:
    OTHERS.append(Habit(what, "loop", do, refused))


def between(what: str, do: Callable[[Any], Any], refused: str = "") -> None:
    OTHERS.append(Habit(what, "between", do, refused))


def both(what: str, do: Callable[[Any], Any], refused: str = "") -> None:
    OTHERS.append(Habit(what, "before", do, refused))
    between(what, do, refused)


def nothing(*_: Any) -> None:
    return None


def twice(_m: nn.Module, _given: Any, out: Tensor) -> Tensor:
    return out * 2


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


# --- hooks of modules -----------------------------------------------------------------------------------------

both("block.register_forward_hook: doubles", lambda m: (m.block.register_forward_hook(twice), None)[1])
both("act.register_forward_hook: reads", lambda m: (m.act.register_forward_hook(nothing), None)[1])
both("first.register_forward_pre_hook: changes x", lambda m: (
    m.first.register_forward_pre_hook(lambda _, x: (x[0] * 0.5,)), None)[1])  # fmt: skip
both("a forward hook, removed again", lambda m: m.block.register_forward_hook(twice).remove())
both("register_forward_hook(with_kwargs=True)", lambda m: (
    m.block.register_forward_hook(lambda _, a, k, out: out * 0.5, with_kwargs=True), None)[1])  # fmt: skip
both("first.register_full_backward_hook", lambda m: m.first.register_full_backward_hook(nothing), BACKWARD)
both("first.register_full_backward_pre_hook", lambda m: m.first.register_full_backward_pre_hook(nothing), BACKWARD)
both("model.register_full_backward_hook", lambda m: m.register_full_backward_hook(nothing), BACKWARD)
between(
    "register_forward_hook of the model, train_step", lambda m: m.register_forward_hook(nothing), "does not call hooks"
)


def around_all(run: Run) -> None:
    """A hook for all modules is traced."""
    double = torch_module.register_module_forward_hook(lambda m, _, out: out * 2 if isinstance(m, nn.Linear) else None)
    with double:
        run.train_step(1)


loop("register_module_forward_hook around a step", around_all)

# --- hooks of parameters ----------------------------------------------------------------------------------------

ON_MESH = "hooks: parameter .* has a gradient hook"
OTHERS.append(Habit("p.register_hook", "before", lambda m: m.scale.register_hook(lambda g: g * 2), ON_MESH))
between("p.register_hook: doubles", lambda m: (m.scale.register_hook(lambda g: g * 2), None)[1])
between("p.register_hook, removed", lambda m: m.scale.register_hook(lambda g: g * 2).remove())
between(
    "p.register_hook: clamps",
    lambda m: ([p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in m.parameters()], 0)[1],
)
between("register_post_accumulate_grad_hook: scales", lambda m: (
    m.scale.register_post_accumulate_grad_hook(halve), None)[1])  # fmt: skip


def counted(run: Run) -> list[int]:
    """How many gradients arrive."""
    seen: list[int] = []
    handle = register_multi_grad_hook(list(run.model.parameters()), lambda found: seen.append(len(found)))
    run.train_step(1)
    handle.remove()
    return seen


def stepping(run: Run) -> None:
    """The optimizer within the backward."""
    parts = {p: torch.optim.SGD([p], 0.1) for p in run.model.parameters()}

    def step(p: Tensor) -> None:
        parts[p].step()  # type: ignore[index]
        p.grad = None

    for p in parts:
        p.register_post_accumulate_grad_hook(step)
    plain(run).backward()


loop("register_multi_grad_hook", counted)
loop("an optimizer for each parameter, in its hook", stepping)

# --- dtypes and autocast ----------------------------------------------------------------------------------------

both("model.bfloat16().double(): rounded", lambda m: m.bfloat16().double())
both("model.type(torch.float64)", lambda m: m.type(torch.float64))
both("model.block.double()", lambda m: m.block.double())


def cast(run: Run, dtype: torch.dtype) -> None:
    """autocast of a float32 model: equal to the precision of ``dtype``."""
    run.model.float()
    with torch.autocast("cpu", dtype):
        loss = plain(run)
    loss.backward()
    run.optimizer.step()


for dtype in (torch.bfloat16, torch.float16):
    what = f"autocast({str(dtype)[6:]}) around the forward, float()"
    OTHERS.append(Habit(what, "loop", lambda r, d=dtype: cast(r, d), tolerance=2e-2))
loop("autocast on, of float64: no cast", lambda r: around_autocast(r))


def around_autocast(run: Run) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run.train_step(1)


# --- wrappers, copies, files --------------------------------------------------------------------------------------

COPIED = "cannot be pickled, nor copied"
between("copy.copy(model)", lambda m: copy.copy(m) and None, COPIED)
between("torch.save(model)", lambda m: torch.save(m, io.BytesIO()), COPIED)
between("swa_utils.AveragedModel(model)", lambda m: torch.optim.swa_utils.AveragedModel(m) and None)
between("nn.DataParallel(model)(**batch)", lambda m: nn.DataParallel(m) and None)
between("nn.Sequential(model): a module in a module", lambda m: len(list(nn.Sequential(m).parameters())))
between("parameters_to_vector", lambda m: round(float(full(parameters_to_vector(
    [full(p.detach()) for p in m.parameters()]).norm())), 10))  # fmt: skip
between(
    "model.get_submodule, get_buffer",
    lambda m: (type(m.get_submodule("block.fc")).__name__, tuple(m.get_buffer("mean").shape)),
)
between(
    "model.children(), named_children()",
    lambda m: ([type(c).__name__ for c in m.children()], [n for n, _ in m.named_children()]),
)
between("model.extra_repr(), repr(model) names its modules", lambda m: "block" in repr(m))
between("hasattr(model, 'nothing')", lambda m: hasattr(m, "nothing"))
between("model.nothing", lambda m: m.nothing, "has no attribute 'nothing'")
between("model.named_parameters(recurse=False)", lambda m: [n for n, _ in m.named_parameters(recurse=False)])
between(
    "named_parameters(remove_duplicate=False)", lambda m: [n for n, _ in m.named_parameters(remove_duplicate=False)]
)
between("p.grad is None after zero_grad", lambda m: [p.grad is None for p in m.parameters()])
between("p.is_leaf, p.requires_grad, p.dtype, p.device", lambda m: [
    (p.is_leaf, p.requires_grad, str(p.dtype), str(p.device)) for p in m.parameters()])  # fmt: skip
between(
    "model.state_dict(keep_vars=True)",
    lambda m: [k for k, v in m.state_dict(keep_vars=True).items() if v.requires_grad],
)


def saved_and_loaded(run: Run) -> None:
    """State through a file, as torch.save writes it."""
    whole = run.model.full_state_dict() if run.on_mesh else run.model.state_dict()
    file = io.BytesIO()
    torch.save(whole, file)
    run.train_step(1)
    file.seek(0)
    run.model.load_state_dict(torch.load(file))
    run.train_step(2)


def added_group(run: Run) -> None:
    parameters = list(run.model.parameters())
    run.optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
    run.optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
    run.train_step(1)


@contextlib.contextmanager
def frozen(model: Any) -> Iterator[None]:
    """As GAN loops do it."""
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


def swapped(run: Run) -> None:
    """Weights swapped for an average and back, by copy_."""
    kept = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.9)
        run.losses.append(float(run.model(**run.batch())["loss"]))
        for p, old in zip(run.model.parameters(), kept):
            p.copy_(old)
    run.train_step(1)


def frozen_step(run: Run) -> None:
    with frozen(run.model.block):
        run.train_step(1)
    run.train_step(2)


def called(run: Run) -> None:
    """With another tensor in place of a parameter; the gradient reaches what it was made of."""
    out = torch.func.functional_call(run.model, {"scale": run.model.scale * 2}, (), run.batch())
    run.losses.append(float(out["loss"].detach()))
    out["loss"].backward()
    run.optimizer.step()
    run.train_step(2)


loop("state through torch.save and torch.load", saved_and_loaded)
loop("optimizer.add_param_group", added_group)
loop("a part frozen for a step, then freed", frozen_step)
loop("weights swapped for an average, and back", swapped)
loop(
    "all frozen, and a step",
    lambda r: (r.model.requires_grad_(False), r.train_step(1)),
    "does not require grad|needs a scalar output with a gradient",
)
loop(
    "train_step within no_grad",
    lambda r: torch.no_grad()(r.train_step)(1),
    "needs grad mode, found it off|does not require grad",
)
loop(
    "train_step within inference_mode",
    lambda r: torch.inference_mode()(r.train_step)(1),
    "needs grad mode, found it off|does not require grad",
)
loop("torch.func.functional_call", called)
loop(
    "p.grad of a step, detached and kept",
    lambda r: (backward(r), round(float(full(r.model.scale.grad.detach().clone().sum())), 10))[1],
)
loop("isinstance(p, nn.Parameter)", lambda r: [isinstance(p, nn.Parameter) for p in r.model.parameters()])
loop("p.full_tensor() where it is a DTensor", lambda r: [
    tuple((p.full_tensor() if isinstance(p, DTensor) else p).shape) for p in r.model.parameters()])  # fmt: skip
loop(
    "a list of losses: sum(losses).backward()",
    lambda r: (sum([r.forward(s)["loss"] for s in (1, 2)]).backward(), r.optimizer.step())[1],
)  # type: ignore[union-attr]
loop(
    "loss.item(), float(loss), f'{loss:.3f}'",
    lambda r: (lambda x: [round(x.item(), 10), round(float(x), 10), f"{x:.3f}"])(plain(r).detach()),
)
loop("positional arguments", lambda r: round(float(r.model(*r.batch().values())["loss"].detach()), 10))
loop("torch.compile(model)", lambda r: (
    torch.compile(r.model, backend="eager")(**r.batch())["loss"].backward(), r.optimizer.step())[1])  # fmt: skip
