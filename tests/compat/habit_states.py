"""What is made of a model's and an optimizer's state: copies, files, plain models of one process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from tests.compat.habit_models import batch, make
from tests.compat.habit_numbers import rounded
from tests.compat.habits import PHASES, STEP, Habit, Run

STATES: list[Habit] = []
BOTH = (STEP, PHASES)


def between(what: str, do: Callable[[Any], Any], refused: str = "") -> None:
    STATES.append(Habit(what, "between", do, refused, ways=BOTH))


def loop(what: str, do: Callable[[Run], Any], refused: str = "") -> None:
    STATES.append(Habit(what, "loop", do, refused, ways=BOTH))


def filed(x: Any) -> Any:
    """Through a file of torch.save."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def loss_of(plain: Any) -> Any:
    return rounded(float(plain(**batch(3))["loss"]))


def of_plain(fill: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The loss of a plain model that has taken the state of the model."""

    def do(model: Any) -> Any:
        plain = make()
        with torch.no_grad():
            fill(plain, model)
        return loss_of(plain)

    return do


def zipped(plain: Any, model: Any) -> None:
    for mine, its in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(its)


between("len(model.state_dict()), names", lambda m: [len(m.state_dict()), *m.state_dict()])
between("plain.load_state_dict(model.state_dict())", of_plain(lambda p, m: p.load_state_dict(m.state_dict())))
between("the same with assign=True", of_plain(lambda p, m: p.load_state_dict(m.state_dict(), assign=True)))
between("zip(plain.state_dict().values(), model.state_dict().values())", of_plain(zipped))
between("plain parameters: w.data = p.data.clone()", of_plain(lambda p, m: [
    setattr(w, "data", x.data.clone()) for w, x in zip(p.parameters(), m.parameters())]),
    "needs a plain tensor for a parameter that is on no mesh")  # fmt: skip
between("plain parameters: w.data.copy_(p.data)", of_plain(lambda p, m: [
    w.data.copy_(x.data) for w, x in zip(p.parameters(), m.parameters())]))  # fmt: skip
between("plain parameters: w.lerp_(p, 0.3)", of_plain(lambda p, m: [
    w.lerp_(x, 0.3) for w, x in zip(p.parameters(), m.parameters())]))  # fmt: skip
between("plain.load_state_dict(torch.load(torch.save(model.state_dict())))", of_plain(
    lambda p, m: p.load_state_dict(filed(m.state_dict()))))  # fmt: skip
between("every value of the state halved, and loaded", lambda m: m.load_state_dict(
    {k: (v * 0.5).to(v.dtype) for k, v in m.state_dict().items()}) and None)  # fmt: skip
between("model.load_state_dict(torch.load(torch.save(model.state_dict())))", lambda m: m.load_state_dict(
    {k: v + 0.5 if v.is_floating_point() else v for k, v in filed(m.state_dict()).items()}) and None)  # fmt: skip
between("type of what torch.load(torch.save(p)) gives", lambda m: [
    f"{type(x).__name__} {tuple(x.shape)} {x.requires_grad}" for x in filed(list(m.parameters()))])  # fmt: skip
between("pickle.loads(pickle.dumps(p))", lambda m: rounded([
    float(pickle.loads(pickle.dumps(p)).detach().sum()) for p in m.parameters()]))  # fmt: skip


def in_place_of_copies(run: Run) -> None:
    """What is written to copy.copy(p) is written to p."""
    with torch.no_grad():
        for p in run.model.parameters():
            copy.copy(p).mul_(0.5)
    run.train_step(1)


def stepped(change: Callable[[Run], Any]) -> Callable[[Run], None]:
    """Two further steps, behind a change of the optimizer's state."""

    def do(run: Run) -> None:
        change(run)
        run.train_step(1)
        run.train_step(2)

    return do


def plain_state(run: Run) -> None:
    """An optimizer of a plain model gives its state."""
    plain = make()
    trained = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(**batch(4))["loss"].backward()
    trained.step()
    run.optimizer.load_state_dict(trained.state_dict())


def by_hand(run: Run) -> None:
    for p in run.model.parameters():
        whole = torch.arange(p.numel(), dtype=torch.float64).view(p.shape)
        run.optimizer.state[p]["momentum_buffer"] = 0.01 * whole


def drawn(run: Run) -> None:
    """States that are replicated on every rank."""
    torch.manual_seed(3)
    for p in run.model.parameters():
        run.optimizer.state[p]["momentum_buffer"] = 0.01 * torch.randn_like(p)


loop("copy.copy(p).mul_(0.5)", in_place_of_copies)
loop("optimizer.load_state_dict(torch.load(torch.save(optimizer.state_dict())))", stepped(
    lambda r: r.optimizer.load_state_dict(filed(r.optimizer.state_dict()))))  # fmt: skip
loop("optimizer.load_state_dict of a plain model's", stepped(plain_state))
loop("optimizer.state[p]['momentum_buffer'] = a whole plain tensor", stepped(by_hand))
loop("optimizer.state[p]['momentum_buffer'] = torch.randn_like(p)", stepped(drawn))


def with_penalty(run: Run) -> None:
    """A group lasso over columns: one row, spread over all."""
    loss = run.forward(1)["loss"]
    (loss + 0.01 * sum(p.norm(dim=0).sum() for p in run.model.parameters() if p.dim() == 2)).backward()
    run.optimizer.step()


loop("loss + p.norm(dim=0).sum()", with_penalty)
