"""Numbers that loops read off parameters and gradients, and what they write into parts of them. Nothing is gathered
here: a line sees what `model.parameters()` gives, and gives back plain numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.habits import PHASES, STEP, Habit, Run

NUMBERS: list[Habit] = []
Line = Callable[[list[nn.Parameter]], Any]
LINES: dict[str, Line] = {}  # of parameters that have gradients


def line(what: str) -> Callable[[Line], Line]:
    """A function of the parameters, behind a backward and before the optimizer's step."""

    def add(fn: Line) -> Line:
        LINES[what] = fn
        NUMBERS.append(Habit(what, "loop", lambda run: _between(run, fn), ways=(STEP, PHASES)))
        return fn

    return add


def _between(run: Run, fn: Line) -> Any:
    if run.on_mesh and not run.phases:
        run.losses.append(float(run.model.train_step(**run.batch(1))))
    else:
        run.forward(1)["loss"].backward()
    found = fn([p for p in run.model.parameters() if p.grad is not None])
    run.optimizer.step()
    return rounded(found)


def rounded(x: Any) -> Any:
    """Numbers to nine places; anything but numbers, lists and texts is an error."""
    if isinstance(x, (list, tuple)):
        return [rounded(y) for y in x]
    assert x is None or isinstance(x, (int, float, str)), f"a {type(x).__name__} is not a number"
    return round(x, 9) + 0.0 if isinstance(x, float) else x


def gradients(ps: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in ps if p.grad is not None]


def matrices(ps: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in ps if p.dim() == 2]


# --- reading --------------------------------------------------------------------------------------------------

line("p.grad.norm(2).item()")(lambda ps: [g.norm(2).item() for g in gradients(ps)])
line("p.grad.norm(p) for p = 1, 3, inf, 0")(
    lambda ps: [g.norm(p).item() for g in gradients(ps) for p in (1, 3, math.inf, 0)]
)
line("p.grad.pow(2).sum().item()")(lambda ps: [g.pow(2).sum().item() for g in gradients(ps)])
line("float(p.sum()), float(p.mean())")(lambda ps: [(float(p.sum()), float(p.mean())) for p in ps])
line("p.abs().max().item(), p.min().item()")(lambda ps: [(p.abs().max().item(), p.min().item()) for p in ps])
line("(p.grad == 0).sum(), torch.count_nonzero")(
    lambda ps: [(int((g == 0).sum()), int(torch.count_nonzero(g > 0.01))) for g in gradients(ps)]
)
line("torch.isnan(p.grad).any(), isfinite().all()")(
    lambda ps: [(bool(torch.isnan(g).any()), bool(g.isfinite().all())) for g in gradients(ps)]
)
line("f'{p.grad.norm():.6f}'")(lambda ps: [f"{g.norm():.6f} {g.abs().mean():.6f}" for g in gradients(ps)])
line("if p.grad.norm() > 0.05")(lambda ps: [1 if g.norm() > 0.05 else 0 for g in gradients(ps)])
line("p.grad.tolist(), p.detach().numpy()")(
    lambda ps: [(g.tolist(), p.detach().numpy().tolist()) for p, g in zip(ps, gradients(ps), strict=True)]
)
line("w.norm(dim=1), w.sum(0), w.mean(1), w.amax(0)")(
    lambda ps: [
        (w.norm(dim=1).tolist(), w.sum(0).tolist(), w.mean(1).tolist(), w.amax(0).tolist()) for w in matrices(ps)
    ]
)
line("w[0], w[:, 1], w[1:3], w[-1, -1]")(
    lambda ps: [(w[0].tolist(), w[:, 1].tolist(), w[1:3].sum().item(), w[-1, -1].item()) for w in matrices(ps)]
)
line("torch.cat([p.grad.flatten() for p in ps]).norm()")(
    lambda ps: torch.cat([g.flatten() for g in gradients(ps)]).norm().item()
)
line("torch.stack([g.norm() for g in grads]).norm()")(
    lambda ps: torch.stack([g.norm() for g in gradients(ps)]).norm().item()
)
line("sum(p.pow(2).sum() for p in ps) ** 0.5")(lambda ps: float(sum(p.pow(2).sum() for p in ps) ** 0.5))
line("torch._foreach_norm(grads)")(lambda ps: [float(x) for x in torch._foreach_norm(gradients(ps))])
line("parameters_to_vector(ps)")(lambda ps: nn.utils.parameters_to_vector(ps).tolist())
line("g.var(), g.std(), g.std(dim=0), g.argmax()")(
    lambda ps: [(g.var().item(), g.std().item(), g.std(0).tolist(), int(g.argmax())) for g in gradients(matrices(ps))]
)
line("g.abs().flatten().topk(3), kthvalue, quantile, median, sort")(
    lambda ps: [
        (x.topk(3).values.tolist(), x.kthvalue(2).values.item(), x.quantile(0.3).item(), x.median().item(),
         x.sort().values.tolist()) for g in gradients(matrices(ps)) for x in [g.abs().flatten()]
    ]
)  # fmt: skip
line("torch.histc(g), torch.unique(g.sign())")(
    lambda ps: [(torch.histc(g, 5, -1, 1).tolist(), torch.unique(g.sign()).tolist()) for g in gradients(matrices(ps))]
)
line("torch.linalg: matrix norm, svdvals, w @ w.t()")(
    lambda ps: [
        (torch.linalg.matrix_norm(w, 2).item(), torch.linalg.svdvals(w.detach()).tolist(), (w @ w.t()).trace().item())
        for w in matrices(ps)
    ]
)
line("torch.allclose, torch.equal")(
    lambda ps: [(torch.allclose(p, p * (1 + 1e-12)), torch.equal(p, p.clone()), torch.equal(p, p + 1)) for p in ps]
)


@line("(p - old).abs().max() before and after a change")
def compared(ps: list[nn.Parameter]) -> Any:
    old = [p.detach().clone() for p in ps]
    with torch.no_grad():
        for p in ps:
            p.mul_(1.5)
    return [(p - o).abs().max().item() for p, o in zip(ps, old, strict=True)]


@line("masked: g[g > 0].sum(), g.masked_select(g < 0).numel()")
def selected(ps: list[nn.Parameter]) -> Any:
    return [(g[g > 0].sum().item(), g.masked_select(g < 0).numel()) for g in gradients(ps)]


# --- gradients that a loop changes by hand ------------------------------------------------------------------


@line("clipped by hand")
def clipped(ps: list[nn.Parameter]) -> Any:
    total = 0.0
    for p in ps:
        total += p.grad.data.norm(2).item() ** 2  # type: ignore[union-attr]
    scale = 0.01 / (total**0.5 + 1e-6)
    if scale < 1:
        for p in ps:
            p.grad.data.mul_(scale)  # type: ignore[union-attr]
    return total**0.5


@line("torch.nn.utils.clip_grad_norm_, clip_grad_value_")
def clipped_by_torch(ps: list[nn.Parameter]) -> Any:
    nn.utils.clip_grad_value_(ps, 0.1)
    return nn.utils.clip_grad_norm_(ps, 0.01).item()


@line("p.grad = p.grad / (p.grad.norm() + 1e-6)")
def normalised(ps: list[nn.Parameter]) -> Any:
    for p in ps:
        p.grad = p.grad / (p.grad.norm() + 1e-6)  # type: ignore[operator, union-attr]


@line("g - g.mean(dim=1, keepdim=True) (centralised)")
def centralised(ps: list[nn.Parameter]) -> Any:
    for p in matrices(ps):
        p.grad.add_(-p.grad.mean(dim=1, keepdim=True)).sub_(p.grad.mean(dim=0, keepdim=True))  # type: ignore[union-attr]


@line("p.grad.add_(noise) of randn_like after manual_seed")
def noisy(ps: list[nn.Parameter]) -> Any:
    torch.manual_seed(3)
    for p in ps:
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)  # type: ignore[union-attr, arg-type]


@line("p.grad += plain, p.grad = plain, p.grad.copy_(plain)")
def plain_gradients(ps: list[nn.Parameter]) -> Any:
    for i, p in enumerate(ps):
        plain = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)
        if i % 3 == 0:
            p.grad += plain
        elif i % 3 == 1:
            p.grad = plain
        else:
            p.grad.copy_(plain)  # type: ignore[union-attr]
    return [g.norm().item() for g in gradients(ps)]


@line("p.grad.data = x, p.grad.data.mul_(2)")
def data_of_gradients(ps: list[nn.Parameter]) -> Any:
    for p in ps:
        p.grad.data = p.grad.data * 3  # type: ignore[union-attr]
        p.grad.data.mul_(2)  # type: ignore[union-attr]


@line("p.grad.detach().zero_(), p.grad[1:] = 0")
def zeroed(ps: list[nn.Parameter]) -> Any:
    ps[0].grad.detach().zero_()  # type: ignore[union-attr]
    for p in ps[1:]:
        p.grad[1:] = 0  # type: ignore[index]


@line("loss + 0.1 * sum(p.pow(2).sum()): a penalty by itself")
def penalty(ps: list[nn.Parameter]) -> Any:
    loss = 0.1 * sum(p.pow(2).sum() + p.sum() + p.norm() for p in ps)
    loss.backward()
    return loss.item()


@line("spectral penalty: svdvals(w).max() differentiated")
def spectral(ps: list[nn.Parameter]) -> Any:
    loss = sum(torch.linalg.svdvals(w).max() + (w @ w.t()).square().mean() + w[0].abs().sum() for w in matrices(ps))
    loss.backward()
    return loss.item()


# --- steps by hand ------------------------------------------------------------------------------------------


@line("SGD and weight decay by hand")
@torch.no_grad()
def sgd(ps: list[nn.Parameter]) -> Any:
    for p in ps:
        p.mul_(1 - 0.01).add_(p.grad, alpha=-0.1)
        p.data = p.data - 0.1 * p.grad.data  # type: ignore[union-attr]


@line("Lion and LAMB by hand: signs, trust ratios")
@torch.no_grad()
def lamb(ps: list[nn.Parameter]) -> Any:
    ratios = []
    for p in ps:
        m = torch.zeros_like(p).lerp_(p.grad, 0.1)
        update = m / (p.grad.square().sqrt() + 1e-3) + 0.1 * m.sign()
        ratio = torch.where(p.norm() > 0, p.norm() / update.norm(), 1.0)
        ratios.append(ratio.item())
        p.sub_(0.01 * ratio * update)
    return ratios


@line("Muon by hand: Newton-Schulz of the gradient")
@torch.no_grad()
def muon(ps: list[nn.Parameter]) -> Any:
    for p in matrices(ps):
        x = p.grad / (p.grad.norm() + 1e-7)  # type: ignore[operator, union-attr]
        for _ in range(3):
            a = x @ x.T
            x = 3.4 * x + (-4.7 * a + 2.0 * a @ a) @ x
        p.add_(x, alpha=-0.1)


@line("EMA and SWA by hand")
@torch.no_grad()
def averaged(ps: list[nn.Parameter]) -> Any:
    average = [p.detach().clone() for p in ps]
    for a, p in zip(average, ps, strict=True):
        p.add_(1.0)
        a.mul_(0.9).add_(p, alpha=0.1)
    kept = [p.data for p in ps]
    for a, p in zip(average, ps, strict=True):
        p.data = a
    inside = [p.sum().item() for p in ps]
    for x, p in zip(kept, ps, strict=True):
        p.data = x
    return inside, [p.sum().item() for p in ps]


@line("vector_to_parameters(parameters_to_vector(ps) * 2)")
def by_vector(ps: list[nn.Parameter]) -> Any:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(ps) * 2, ps)


# --- parts that are written ---------------------------------------------------------------------------------


def written(what: str, write: Callable[[Tensor], Any], of: Callable[[Any], Any] = matrices) -> None:
    @torch.no_grad()
    def fn(ps: list[nn.Parameter]) -> Any:
        for p in of(ps):
            write(p), write(p.grad)  # type: ignore[arg-type]

    line(what)(fn)


def everything(ps: Any) -> Any:
    return ps


written("w[0].zero_(), w[-1] = 1", lambda w: (w[0].zero_(), w.__setitem__(-1, 1)))
written("b[1:].fill_(0.5), b[::2] += 1", lambda w: (w[1:].fill_(0.5), w[::2].add_(1)), everything)
written("w.data[[0, 2]] = 0, w.data[:, 1] = 2", lambda w: (w.data.__setitem__([0, 2], 0), w.data[:, 1].fill_(2)))
written("w.view(-1)[3] = 1, w.flatten()[0]", lambda w: (w.view(-1).__setitem__(3, 1), w.view(-1)[5:].mul_(2)))
written("w.t()[0].mul_(2), w.T[:, 1] = 0", lambda w: (w.t()[0].mul_(2), w.T.__setitem__((slice(None), 1), 0)))
written("w.diagonal().fill_(1), w.fill_diagonal_(2)", lambda w: (w.diagonal().fill_(1), w[:4, :4].fill_diagonal_(2)))
written("w[w.abs() < 0.1] = 0", lambda w: w.__setitem__(w.abs() < 0.1, 0), everything)
written("w.masked_fill_(w < 0, 0), w.where", lambda w: (w.masked_fill_(w < 0, 0), w.copy_(torch.where(w > 0.1, w, -w))))
written("pruned below kthvalue", lambda w: w.mul_(w.abs() > w.abs().flatten().kthvalue(w.numel() // 2).values))
written("w.index_fill_, index_add_, index_copy_", lambda w: (
    w.index_fill_(0, torch.tensor([1]), 3.0), w.index_add_(0, torch.tensor([0]), w[2:3].clone()),
    w.index_copy_(1, torch.tensor([0]), w[:, 3:4].clone())))  # fmt: skip
written("w.narrow(0, 2, 1).copy_(x)", lambda w: w.narrow(0, 2, 1).copy_(torch.arange(w.shape[1]).to(w)))
written("for part in w.chunk(2): part.mul_(i)", lambda w: [x.mul_(i + 2) for i, x in enumerate(w.chunk(2))])
written("a, b = w.split([1, n - 1]); row.zero_() of unbind", lambda w: (
    w.split([1, len(w) - 1])[1].mul_(2), w.unbind(0)[1].zero_()))  # fmt: skip
written("nn.init.normal_(w[:3]) after manual_seed", lambda w: (torch.manual_seed(1), nn.init.normal_(w[:3])))
written("nn.init.xavier_uniform_, orthogonal_ after manual_seed", lambda w: (
    torch.manual_seed(2), nn.init.xavier_uniform_(w), w.add_(nn.init.orthogonal_(torch.empty_like(w)))))  # fmt: skip
written("max-norm: w.renorm_(2, 0, 0.5)", lambda w: w.renorm_(2, 0, 0.5))
written("w.data = w / w.norm(dim=0)", lambda w: setattr(w, "data", w / w.norm(dim=0)))
written("w.div_(w.norm(dim=1, keepdim=True))", lambda w: w.div_(w.norm(dim=1, keepdim=True)))
written("w.scatter_, w.put_, w.copy_(w.flip(0))", lambda w: (
    w.scatter_(1, torch.tensor([[0], [1]]), 5.0), w.put_(torch.tensor([3]), torch.tensor([2.0]).to(w)),
    w.copy_(w.flip(0))))  # fmt: skip
written("w[1, 2] += 1, w[[0], [1]] *= 2", lambda w: (w[1, 2].add_(1), w.__setitem__(([0], [1]), w[[0], [1]] * 2)))


@line("views that are kept over writes and over a step")
def kept_views(ps: list[nn.Parameter]) -> Any:
    views = [v for w in matrices(ps) for v in (w.detach()[1], w.data.view(-1), w.detach().t()[:, 0])]
    with torch.no_grad():
        for w in matrices(ps):
            w.mul_(2)
    found = [v.sum().item() for v in views]
    torch.optim.SGD(ps, lr=0.1).step()
    found += [v.sum().item() for v in views]
    views[0].fill_(1)
    return [*found, *(w.sum().item() for w in ps)]


@line("nan on one rank's part: norm, max, isfinite; nan_to_num_")
def not_finite(ps: list[nn.Parameter]) -> Any:
    g = matrices(ps)[0].grad
    assert g is not None
    g[-1, -1] = float("nan")
    found = [
        str(x.item()) for x in (g.max(), g.amin(), g.norm(), g.norm(math.inf), g.isnan().sum(), g.isfinite().all())
    ]
    g.nan_to_num_(0.5)
    return found


@line("torch.tensor([g.norm() for g in grads]), total += g.norm() ** 2")
def listed(ps: list[nn.Parameter]) -> Any:
    total = torch.zeros((), dtype=torch.float64)
    for g in gradients(ps):
        total += g.norm() ** 2
    return torch.tensor([g.norm() for g in gradients(ps)]).tolist(), total.sqrt().item()


@line("optimizer.state: norms, a row of exp_avg zeroed")
def states(ps: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.Adam(ps, lr=0.01)
    optimizer.step()
    found = [(s["exp_avg"].norm().item(), s["exp_avg_sq"].sum().item()) for s in optimizer.state.values()]
    for s in optimizer.state.values():
        s["exp_avg"][0] = 0
    optimizer.step()
    return found


@line("LBFGS of a function of the parameters")
def lbfgs(ps: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.LBFGS(ps, lr=0.1, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Any = sum((p - 0.3).square().sum() for p in ps)
        loss.backward()
        return loss  # type: ignore[no-any-return]

    return float(optimizer.step(closure))


@line("inference_mode: p.norm(), w[0], p.view(-1)[1]")
@torch.inference_mode()
def inferred(ps: list[nn.Parameter]) -> Any:
    return [(p.norm().item(), p[0].sum().item(), p.view(-1)[1].item(), (p * 2).sum().item()) for p in ps]


@line("copy.deepcopy(p), p.float(), p.data_ptr()")
def copied(ps: list[nn.Parameter]) -> Any:
    copies = [copy.deepcopy(p) for p in ps]
    same = [int(p.data_ptr() == q.data_ptr()) for p in ps for q in ps]
    return [(c.sum().item(), int(c.requires_grad), round(p.float().sum().item(), 4)) for c, p in zip(copies, ps)], same


@line("torch.from_dlpack(p.detach())")
def from_dlpack(ps: list[nn.Parameter]) -> Any:
    return [torch.from_dlpack(p.detach()).sum().item() for p in ps]


written("w.add_(one row for all), w.mul_(one column for all)", lambda w: (
    w.add_(torch.arange(w.shape[1]).to(w.dtype)[None]), w.mul_(torch.arange(w.shape[0]).to(w.dtype)[:, None])))  # fmt: skip
