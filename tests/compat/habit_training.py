"""What training recipes do around a model: averages, twins, sharpness-aware steps, masks, schedules, surgery of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

from tests.compat.habits import Habit, Run

TRAINING: list[Habit] = []
Recipe = Callable[[Run], Any]


def loop(what: str, refused: str = "") -> Callable[[Recipe], Recipe]:
    def add(recipe: Recipe) -> Recipe:
        TRAINING.append(Habit(what, "loop", recipe, refused))
        return recipe

    return add


def gradients(run: Run, step: int, model: Any = None) -> list[nn.Parameter]:
    """The parameters, with gradients of a batch."""
    model = run.model if model is None else model
    loss = model(**run.batch(step))["loss"]
    run.losses.append(float(loss.detach()))
    loss.backward()
    return [p for p in model.parameters() if p.requires_grad]


def stepped(run: Run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


def evaluated(run: Run, model: Any) -> None:
    model.eval()
    with torch.no_grad():
        run.losses.append(float(model(**run.batch(3))["loss"]))


def averaged(run: Run, **how: Any) -> None:
    average = swa_utils.AveragedModel(run.model, **how)
    for step in (1, 2):
        run.train_step(step)
        average.update_parameters(run.model)
    evaluated(run, average)
    run.losses.append(float(average.n_averaged))
    other = swa_utils.AveragedModel(run.model, **how)
    other.load_state_dict(average.state_dict())
    evaluated(run, other)
    run.train_step(1)


loop("AveragedModel(model): update_parameters, its state, evaluation")(averaged)
loop("the same with get_ema_multi_avg_fn, use_buffers=True")(
    lambda run: averaged(run, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
)


@loop("a twin by copy.deepcopy(model), trained by itself; parts of it frozen")
def twin(run: Run) -> None:
    other = copy.deepcopy(run.model)
    other.block.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.2)
    for step in (1, 2):
        gradients(run, step, other)
        optimizer.step()
        optimizer.zero_grad()
        run.train_step(step)
    evaluated(run, other)


@loop("a frozen teacher by copy.deepcopy, teacher.lerp_(student)")
@torch.no_grad()
def teacher(run: Run) -> None:
    mean = copy.deepcopy(run.model).requires_grad_(False)
    with torch.enable_grad():
        run.train_step(1)
    for mine, its in zip(mean.state_dict().values(), run.model.state_dict().values(), strict=True):
        mine.copy_(0.5 * mine + 0.5 * its) if mine.is_floating_point() else mine.copy_(its)
    evaluated(run, mean)


@loop("sharpness-aware: p.add_(e), a second backward, p.sub_(e)")
def sharpness(run: Run) -> None:
    parameters = gradients(run, 1)
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()  # type: ignore[union-attr]
    moved = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]  # type: ignore[operator]
    with torch.no_grad():
        torch._foreach_add_(parameters, moved)
    run.optimizer.zero_grad()
    gradients(run, 1)
    with torch.no_grad():
        torch._foreach_sub_(parameters, moved)
    stepped(run)


@loop("lookahead: slow.add_(p - slow, alpha=0.5); p.copy_(slow)")
def lookahead(run: Run) -> None:
    slow = [p.detach().clone() for p in run.model.parameters()]
    for step in (1, 2):
        run.train_step(step)
    with torch.no_grad():
        for p, q in zip(run.model.parameters(), slow, strict=True):
            p.copy_(q.add_(p - q, alpha=0.5))
    run.train_step(3)


@loop("clipped by module; by the norm of each row (adaptive)")
def clipped(run: Run) -> None:
    parameters = gradients(run, 1)
    for module in (run.model.first, run.model.block):
        run.losses.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.01)))
    for p in parameters:
        assert p.grad is not None
        if p.dim() > 1:
            most = p.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > most, p.grad * (most / norm.clamp(min=1e-6)), p.grad))
    stepped(run)


@loop("a mask of weights, on gradients and after each step")
def masked(run: Run) -> None:
    masks = {p: (p.detach().abs() > 0.2).to(p.dtype) for p in run.model.parameters() if p.dim() > 1}
    for step in (1, 2):
        gradients(run, step)
        with torch.no_grad():
            for p, mask in masks.items():
                p.grad.mul_(mask)  # type: ignore[union-attr]
            stepped(run)
            for p, mask in masks.items():
                p.mul_(mask)


@loop("elastic weight consolidation: (fisher * (p - old) ** 2).sum().backward()")
def consolidated(run: Run) -> None:
    old = [p.detach().clone() for p in run.model.parameters()]
    fisher = [p.grad.detach() ** 2 for p in gradients(run, 1)]  # type: ignore[union-attr]
    stepped(run)
    parameters = gradients(run, 2)
    penalty = sum((f * (p - q) ** 2).sum() for f, p, q in zip(fisher, parameters, old, strict=True))
    penalty.backward()  # type: ignore[union-attr]
    run.losses.append(float(penalty))
    stepped(run)


@loop("gradients of two batches projected on each other")
def projected(run: Run) -> None:
    first = [p.grad.clone() for p in gradients(run, 1)]  # type: ignore[union-attr]
    run.optimizer.zero_grad()
    parameters = gradients(run, 2)
    share = sum((a * p.grad).sum() for a, p in zip(first, parameters, strict=True)) / sum((a * a).sum() for a in first)
    for a, p in zip(first, parameters, strict=True):
        p.grad.sub_(share * a)  # type: ignore[union-attr]
    stepped(run)


@loop("a learning rate finder: LambdaLR, then both states loaded back")
def finder(run: Run) -> None:
    kept = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda i: 1.5**i)
    for step in (1, 2):
        run.train_step(step)
        schedule.step()
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    run.train_step(1)


@loop("param_groups by depth, edited between steps")
def by_depth(run: Run) -> None:
    groups = [{"params": list(m.parameters()), "lr": 0.1 * 0.5**i} for i, m in enumerate(
        (run.model.last, run.model.block, run.model.bn, run.model.first))]  # fmt: skip
    run.optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    for step in (1, 2):
        run.train_step(step)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5
            group["betas"] = (0.8, 0.99)


@loop("unfrozen one by one, a new optimizer each time")
def unfrozen(run: Run) -> None:
    run.model.requires_grad_(False)
    for step, module in enumerate((run.model.last, run.model.block, run.model.first)):
        module.requires_grad_(True)
        run.optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
        run.train_step(step)


@loop("two optimizers of parts, one every other step")
def alternating(run: Run) -> None:
    one = torch.optim.SGD(run.model.block.parameters(), lr=0.1)
    other = torch.optim.Adam([*run.model.first.parameters(), *run.model.last.parameters()], lr=0.01)
    for step in (1, 2, 3):
        gradients(run, step)
        one.step()
        if step % 2:
            other.step()
        one.zero_grad()
        other.zero_grad()
        run.optimizer.zero_grad()


@loop("optimizer.register_step_pre_hook: gradients centralised")
def centralised(run: Run) -> None:
    def subtract(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    handle = run.optimizer.register_step_pre_hook(subtract)
    run.train_step(1)
    handle.remove()
    run.train_step(2)


@loop("a step skipped where a gradient is nan")
def skipped(run: Run) -> None:
    for step in (1, 2):
        parameters = gradients(run, step)
        if step == 1:
            run.model.scale.grad.mul_(float("nan"))
        if all(bool(torch.isfinite(p.grad).all()) for p in parameters):  # type: ignore[arg-type]
            run.optimizer.step()
        run.optimizer.zero_grad()


@loop("a state with the prefix 'module.', stripped, partly loaded")
def prefixed(run: Run) -> list[Any]:
    state = {f"module.{n}": 0.5 * x if x.is_floating_point() else x for n, x in run.model.state_dict().items()}
    del state["module.scale"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    found = run.model.load_state_dict(state, strict=False)
    run.train_step(1)
    return list(found.missing_keys)


@loop("reset_parameters of modules after manual_seed")
def reset(run: Run) -> None:
    torch.manual_seed(5)
    for module in (run.model.first, run.model.block.fc):
        module.reset_parameters()
    run.train_step(1)


@loop("OneCycleLR with momentum, ReduceLROnPlateau on the loss")
def scheduled(run: Run) -> None:
    cycle = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.2, total_steps=4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, threshold=0.9)
    for step in (1, 2):
        run.train_step(step)
        cycle.step()
        plateau.step(run.losses[-1])
        run.losses += [run.optimizer.param_groups[0][name] for name in ("lr", "momentum")]


@loop("losses of outputs: a distillation of logits of a detached forward")
def distilled(run: Run) -> None:
    with torch.no_grad():
        target = run.whole(run.model(**run.batch(2))["logits"]).softmax(-1)
    out = run.forward(1)
    more: Tensor = F.kl_div(run.whole(out["logits"]).log_softmax(-1), target, reduction="batchmean")
    (out["loss"] + more).backward()
    stepped(run)
