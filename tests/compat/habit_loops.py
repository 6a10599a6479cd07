"""Habits around a step: what users write in their loops. `do` takes a `Run` and stands for the second step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.habit_models import batch
from tests.compat.habits import Habit, Run, full

LOOPS: list[Habit] = []
functional = nn.functional


def loop(what: str, do: Callable[[Run], Any], refused: str = "") -> None:
    LOOPS.append(Habit(what, "loop", do, refused))


def plain(run: Run) -> Tensor:
    """The loss of the next forward."""
    loss: Tensor = run.forward()["loss"]
    return loss


def backward(run: Run, change: Callable[[Tensor], Tensor] = lambda x: x, **how: Any) -> None:
    change(plain(run)).backward(**how)
    run.optimizer.step()


def around(run: Run, context: Any) -> None:
    with context:
        run.train_step(1)


def of(run: Run, change: Callable[[Any], Tensor]) -> None:
    """A loss made of the outputs."""
    change(run.forward()).backward()
    run.optimizer.step()


def twice(run: Run, *, retain: bool) -> None:
    loss = plain(run)
    loss.backward(retain_graph=retain)
    loss.backward()
    run.optimizer.step()


def two_forwards(run: Run, swapped: bool) -> None:
    losses = [run.forward(step)["loss"] for step in (1, 2)]
    for loss in reversed(losses) if swapped else losses:
        loss.backward()
    run.optimizer.step()


def written(run: Run, write: Callable[[Run, Any], Any]) -> None:
    """Something is written to between forward and backward."""
    out = run.forward()
    with torch.no_grad():
        write(run, out)
    out["loss"].backward()
    run.optimizer.step()


def by_grad(run: Run, **how: Any) -> list[Any]:
    chosen = [run.model.scale, run.model.first.weight]
    found = torch.autograd.grad(plain(run), chosen, **how)
    return [round(float(full(g.sum())), 10) for g in found]


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(plain(run)).backward()
    scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    scaler.update()


def clipped(run: Run, by: Callable[[Any], Any]) -> float:
    plain(run).backward()
    norm = by(list(run.model.parameters()))
    run.optimizer.step()
    return 0.0 if norm is None else round(float(full(norm)), 10)


def after_backward(run: Run, do: Callable[[Any], Any]) -> None:
    plain(run).backward()
    with torch.no_grad():
        do(run.model)
    run.optimizer.step()


def trained_with(run: Run, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    run.optimizer = make(run.model.parameters())
    for step in (1, 2):
        run.train_step(step)


def scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.1)
    for step in (1, 2):
        run.train_step(step)
        scheduler.step()


def grouped(run: Run) -> None:
    decay = [p for p in run.model.parameters() if p.dim() > 1]
    rest = [p for p in run.model.parameters() if p.dim() <= 1]
    run.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], lr=0.05)
    run.train_step(1)


def closure(run: Run) -> None:
    def call() -> Tensor:
        run.optimizer.zero_grad()
        loss = plain(run)
        loss.backward()
        return loss

    run.optimizer.step(call)


def reloaded(run: Run) -> None:
    """The optimizer's state goes into a new one."""
    state = run.optimizer.state_dict()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.optimizer.load_state_dict(state)
    run.train_step(1)


def averaged(run: Run) -> list[float]:
    """An exponential average, kept by hand."""
    average = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.train_step(1)
    with torch.no_grad():
        for n, p in run.model.named_parameters():
            average[n].lerp_(p.detach(), 0.1)
    return [round(float(full(x.sum())), 10) for x in average.values()]


def accumulated(run: Run) -> None:
    for step in (1, 2, 3):
        (run.forward(step)["loss"] / 3).backward()
    run.optimizer.step()


def in_eval(run: Run, context: Callable[[], Any]) -> list[float]:
    run.model.eval()
    with context():
        out = run.forward()
    run.model.train()
    return [float(out["loss"].requires_grad), round(float(full(out["logits"].detach()).abs().max()), 10)]


def evaluated_and_trained(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.forward()
    run.model.train()
    run.train_step(1)


def smaller(run: Run) -> None:
    """Half of the whole batch."""
    run.losses.append(float(run.model(**run.part({k: v[:4] for k, v in batch(1).items()}))["loss"]))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- what surrounds a step --------------------------------------------------------------------------------

NO_GRADIENTS = "train_step: needs grad mode, found it off"
loop("enable_grad around train_step", lambda r: around(r, torch.enable_grad()))
loop("use_deterministic_algorithms around a step", lambda r: around(r, deterministic()))
loop("set_default_dtype(float64) around a step", lambda r: around(r, default_dtype(torch.float64)))
loop("autocast(enabled=False) around a step", lambda r: around(r, torch.autocast("cpu", enabled=False)))
loop(
    "detect_anomaly around a step",
    lambda r: around(r, torch.autograd.detect_anomaly()),
    "detect_anomaly: needs an eager backward",
)
loop("detect_anomaly around forward and backward", lambda r: anomaly(r), "detect_anomaly: needs an eager backward")
loop("torch.device('cpu') around a step", lambda r: around(r, torch.device("cpu")))
loop("set_detect_anomaly, then off", lambda r: (torch.autograd.set_detect_anomaly(False), r.train_step(1)))
loop("manual_seed before a step", lambda r: (torch.manual_seed(3), r.train_step(1)))
loop("two train_steps", lambda r: (r.train_step(1), r.train_step(2)))


def anomaly(run: Run) -> None:
    with torch.autograd.detect_anomaly():
        backward(run)


# --- backward -----------------------------------------------------------------------------------------------

loop("model(**b)['loss'].backward()", lambda r: backward(r))
loop("(loss / 4).backward()", lambda r: backward(r, lambda x: x / 4))
loop("loss /= 4 (in place)", lambda r: backward(r, lambda x: x.div_(4)))
loop("(loss ** 2).backward()", lambda r: backward(r, lambda x: x**2))
loop("(-loss).backward()", lambda r: backward(r, lambda x: -x))
loop("(loss + loss.detach()).backward()", lambda r: backward(r, lambda x: x + x.detach()))
loop("(loss + p.sum() of a parameter)", lambda r: backward(r, lambda x: x + full(r.model.scale.sum()) * 0.1))
loop("loss.backward(gradient=2)", lambda r: backward(r, gradient=torch.tensor(2.0).double()))
loop("loss.backward(retain_graph=True)", lambda r: backward(r, retain_graph=True))
loop("loss.backward(inputs=[p])", lambda r: backward(r, inputs=[r.model.scale]))
loop("backward twice, with retain_graph", lambda r: twice(r, retain=True))
loop("backward twice, without", lambda r: twice(r, retain=False), "(second time|already differentiated)")
loop("loss.backward(create_graph=True)", lambda r: backward(r, create_graph=True), r"backward\(create_graph=True\)")
loop("two forwards, then two backwards", lambda r: two_forwards(r, False))
loop("two forwards, backwards in the other order", lambda r: two_forwards(r, True))
loop("gradients of three batches accumulate", accumulated)
loop("loss.detach().backward()", lambda r: backward(r, lambda x: x.detach()), "does not require grad")
loop("autograd.grad(loss, parameters)", lambda r: by_grad(r))
loop("autograd.grad with allow_unused", lambda r: by_grad(r, allow_unused=True))
loop("autograd.grad with retain_graph", lambda r: by_grad(r, retain_graph=True))
loop("autograd.grad with create_graph", lambda r: by_grad(r, create_graph=True), r"backward\(create_graph=True\)")
loop("GradScaler: scale, unscale_, step, update", scaled)
loop("a forward under no_grad, then a step", lambda r: (torch.no_grad()(r.forward)(), r.train_step(1)))
loop("a forward under inference_mode, then a step", lambda r: (torch.inference_mode()(r.forward)(), r.train_step(1)))
loop("a forward that nobody differentiates", lambda r: (r.forward(), r.train_step(2)) and None)

# --- losses made of outputs -----------------------------------------------------------------------------------

loop("out.logits.sum().backward()", lambda r: of(r, lambda o: o["logits"].sum()))
loop(
    "out.loss + 0.1 * out.logits.pow(2).mean()",
    lambda r: of(r, lambda o: o["loss"] + 0.1 * full(o["logits"].pow(2).mean())),
)
loop("a loss of out.logits.detach()", lambda r: of(r, lambda o: o["loss"] * full(o["logits"].detach().mean())))
loop(
    "F.mse_loss(whole logits, 0)",
    lambda r: of(r, lambda o: functional.mse_loss(full(o["logits"]), torch.zeros(8, 4).double())),
)
loop("logits.backward(ones)", lambda r: of(r, lambda o: full(o["logits"]).mean()))
loop(
    "retain_grad() of the loss",
    lambda r: (x := plain(r), x.retain_grad(), x.backward(), r.optimizer.step()) and float(x.grad),
)
loop("a hook on the loss", lambda r: backward(r, lambda x: (x.register_hook(lambda g: g * 2), x)[1]))
loop("loss.requires_grad, loss.grad_fn", lambda r: (x := plain(r)).requires_grad and x.grad_fn is not None)
loop("inputs that require a gradient", lambda r: leaf_inputs(r), "x requires a gradient, which only parameters get")


def leaf_inputs(run: Run) -> None:
    batch = run.batch()
    batch["x"].requires_grad_()
    run.model(**batch)["loss"].backward()


# --- between forward and backward -----------------------------------------------------------------------------

INPLACE = "modified by an inplace operation"
loop(
    "a weight is written between forward and backward",
    lambda r: written(r, lambda r, o: r.model.last.weight.mul_(2)),
    INPLACE,
)
loop(
    "optimizer.step() between forward and backward",
    lambda r: written(r, lambda r, o: [p.add_(1) for p in r.model.parameters()]),
    INPLACE,
)
loop("a buffer that the forward writes, between", lambda r: written(r, lambda r, o: r.model.mean.fill_(1)))
loop("the bias that nobody reads is written between", lambda r: written(r, lambda r, o: r.model.first.bias.add_(1)))
loop(
    "load_state_dict of what is no weight, strict=False, between",
    lambda r: written(r, lambda r, o: (r.model.load_state_dict({"mean": torch.ones(6)}, strict=False), None)[1]),
)
loop("model.eval() between forward and backward", lambda r: written(r, lambda r, o: r.model.eval()))
loop("zero_grad between forward and backward", lambda r: written(r, lambda r, o: r.model.zero_grad()))

# --- gradients ------------------------------------------------------------------------------------------------

loop("clip_grad_norm_", lambda r: clipped(r, lambda p: nn.utils.clip_grad_norm_(p, 0.1)))
loop("clip_grad_norm_ of the max norm", lambda r: clipped(r, lambda p: nn.utils.clip_grad_norm_(p, 0.1, float("inf"))))
loop("clip_grad_norm_(foreach=False)", lambda r: clipped(r, lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False)))
loop("clip_grad_value_", lambda r: clipped(r, lambda p: nn.utils.clip_grad_value_(p, 0.01)))
loop(
    "get_total_norm", lambda r: clipped(r, lambda p: nn.utils.get_total_norm([x.grad for x in p if x.grad is not None]))
)
loop("p.grad.mul_(0.5)", lambda r: after_backward(r, lambda m: [p.grad.mul_(0.5) for p in m.parameters()]))
loop("p.grad = None", lambda r: after_backward(r, lambda m: setattr(m.scale, "grad", None)))
loop("p.grad.zero_()", lambda r: after_backward(r, lambda m: m.scale.grad.zero_()))
loop("p.grad = p.grad * 2", lambda r: after_backward(r, lambda m: setattr(m.scale, "grad", m.scale.grad * 2)))
loop(
    "p.grad = torch.zeros_like(p)",
    lambda r: after_backward(r, lambda m: setattr(m.scale, "grad", torch.zeros_like(m.scale))),
)
loop(
    "noise on p.grad: p.grad.add_(p, alpha=0.1)",
    lambda r: after_backward(r, lambda m: [p.grad.add_(p, alpha=0.1) for p in m.parameters()]),
)
loop("p.grad.norm() is read", lambda r: clipped(r, lambda p: p[0].grad.norm()))
loop("p.grad before, and a step more", lambda r: (plain(r).backward(), r.train_step(2)) and None)
loop(
    "zero_grad(set_to_none=False), and a step",
    lambda r: (plain(r).backward(), r.model.zero_grad(set_to_none=False), r.train_step(2)) and None,
)

# --- optimizers -----------------------------------------------------------------------------------------------

for name, how in {
    "SGD": {"lr": 0.1}, "Adam": {"lr": 0.01}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}, "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01}, "Adamax": {"lr": 0.01}, "NAdam": {"lr": 0.01}, "RAdam": {"lr": 0.01},
    "Adadelta": {"lr": 1.0}, "Rprop": {"lr": 0.01}, "ASGD": {"lr": 0.01},
}.items():  # fmt: skip
    loop(f"optim.{name}", lambda r, n=name, h=how: trained_with(r, lambda p: getattr(torch.optim, n)(p, **h)))
loop("AdamW(foreach=False)", lambda r: trained_with(r, lambda p: torch.optim.AdamW(p, foreach=False)))
loop("AdamW(fused=True)", lambda r: trained_with(r, lambda p: torch.optim.AdamW(p, fused=True)))
loop("Adam(amsgrad=True)", lambda r: trained_with(r, lambda p: torch.optim.Adam(p, amsgrad=True)))
loop("SGD(maximize=True, nesterov=True)", lambda r: trained_with(
    r, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True)))  # fmt: skip
loop("groups with and without decay", grouped)
loop("a learning rate schedule", scheduled)
loop("optimizer.step(closure)", closure)
loop("optimizer.state_dict into a new optimizer", reloaded)
loop(
    "optimizer.param_groups[0]['lr'] = 0.5",
    lambda r: (r.optimizer.param_groups[0].update(lr=0.5), r.train_step(1)) and None,
)
loop("optimizer.zero_grad() before backward", lambda r: (r.optimizer.zero_grad(), r.train_step(1)) and None)
loop("an exponential average by hand", averaged)

# --- evaluation -----------------------------------------------------------------------------------------------

loop("eval(), no_grad", lambda r: in_eval(r, torch.no_grad))
loop("eval(), inference_mode", lambda r: in_eval(r, torch.inference_mode))
loop("eval(), gradients on", lambda r: in_eval(r, contextlib.nullcontext))
loop("eval(), forward, train(), a step", evaluated_and_trained)
loop("eval() and a training step", lambda r: (r.model.eval(), r.train_step(1)) and None)
loop("loss.backward() in eval mode", lambda r: (r.model.eval(), backward(r)) and None)
loop("another batch size", smaller)
