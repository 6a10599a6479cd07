"""torch's own samples of operators and modules, each as a model on a mesh beside one process.

    python -m tests.outside.torch_samples                     all of them: an hour on two cores
    python -m tests.outside.torch_samples addmm nn.Bilinear   these

A sample's tensors with the size of the first one's first dim are the batch, others are buffers, and all are multiplied
by a parameter. The batch is sharded where 2, 3 or 5 divide it; modules run over tp, too.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import is_refusal
from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model
from autopar.testing.reference import LIMIT, Expected, eager

SAMPLES = 4  # of an operator
EXACT = "exact"
# Not tried: no values, random numbers, a kernel that reads memory by indices which nobody checks, sparse inputs (which
# are refused where a batch comes in).
LEFT_OUT = {
    "empty_like", "new_empty", "empty_permuted", "new_empty_strided", "empty_strided", "rand_like", "randn_like",
    "randint_like", "normal", "bernoulli", "multinomial", "uniform", "cauchy", "exponential", "geometric", "log_normal",
    "nn.functional.rrelu", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "max_pool2d_with_indices_backward", "sparse.mm",
}  # fmt: skip
# torch's derivative of as_strided_scatter is wrong. Where examples do not take their own rows of a source, a step on
# ranks raises, which one process that plays all of them does not.
KNOWN = {"as_strided_scatter", "masked_scatter"}


@dataclass
class Sample:
    """name: of the operator or module; call: it; arguments: (args, kwargs)."""

    name: str
    call: Any
    arguments: Any


class Around(nn.Module):
    """A call whose arguments are multiplied by a parameter; the loss is of all that it returns."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.call = sample.call
        self.w = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        leaves, self.spec = pytree.tree_flatten(sample.arguments)
        leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        first = next((x for x in leaves if isinstance(x, Tensor)), None)
        self.rows = first.shape[0] if first is not None and first.dim() and first.numel() else 0
        self.batch, self.constants = dict[str, Tensor](), list[Any]()
        for place, x in enumerate(leaves):
            of_batch = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self.rows
            if of_batch:
                self.batch[f"x{place}"] = x
            elif isinstance(x, Tensor):
                self.register_buffer(f"b{place}", x)
            self.constants.append(None if isinstance(x, Tensor) else x)

    def forward(self, **batch: Tensor) -> Any:
        leaves = [batch.get(f"x{i}", getattr(self, f"b{i}", x)) for i, x in enumerate(self.constants)]
        leaves = [x * self.w if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        loss: Any = 0
        for x in pytree.tree_leaves(self.call(*args, **kwargs)):
            if isinstance(x, Tensor):
                real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()
                loss = loss + real.sin().sum() + (real * real).sum() / 100
        return loss * self.w


def operators(names: set[str] | None = None) -> Iterator[Sample]:
    """Of `torch.testing._internal`'s table of operators: four of each, those first whose batch can be sharded."""
    from torch.testing._internal.common_methods_invocations import op_db  # needs expecttest

    for op in op_db:
        if op.name in LEFT_OUT or (names is not None and op.name not in names):
            continue
        dtype = torch.float64 if torch.float64 in op.dtypes else torch.int64
        if dtype not in op.dtypes:
            continue
        given = [((s.input, *s.args), s.kwargs) for s in op.sample_inputs("cpu", dtype, requires_grad=False)]
        made = [Sample(op.name, op.op, one) for one in given]
        made.sort(key=lambda sample: _ranks(Around(sample).rows) == 1)
        yield from made[:: max(1, len(made) // SAMPLES)][:SAMPLES]


def modules(names: set[str] | None = None) -> Iterator[Sample]:
    """Of torch's table of modules."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if torch.float64 not in info.dtypes or (names is not None and info.name not in names):
            continue
        for train in (True, False):
            how: dict[str, Any] = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": train}
            for given in info.module_inputs_func(info, **how)[:14]:
                made = given.constructor_input
                module = info.module_cls(*made.args, **made.kwargs).double().train(train)
                if not any(
                    isinstance(m, nn.modules.dropout._DropoutNd) or getattr(m, "dropout", 0) for m in module.modules()
                ):
                    yield Sample(info.name, module, (given.forward_input.args, given.forward_input.kwargs))


def outcomes(sample: Sample) -> Iterator[str]:
    """On each mesh: "exact", a refusal, or what is wrong (it begins with "wrong"). Nothing where torch cannot run it or
    gives no finite numbers."""
    model = Around(sample)
    try:
        expected = eager(model, model.batch)
    except Exception:
        return
    size = _size(expected)
    if not model.rows or not size < 1e9:
        return
    for mesh in (Mesh.of(dp=_ranks(model.rows)), *([Mesh.of(tp=2)] if isinstance(sample.call, nn.Module) else [])):
        try:
            worst = check_model(model, model.batch, mesh).worst
            yield EXACT if worst < LIMIT * size else f"wrong: {worst:.1e} on {mesh}"
        except Exception as error:
            yield str(error) if is_refusal(error) else f"wrong: {type(error).__name__}: {error}"


def _ranks(rows: int) -> int:
    return next((n for n in (2, 3, 5) if rows and rows % n == 0), 1)


def _size(expected: Expected) -> float:
    """The greatest magnitude of the loss and its gradients, at least 1; NaN if one is not finite."""
    found = [abs(float(expected.loss)), *(float(g.abs().max()) for g in expected.gradients.values() if g is not None)]
    return max(1.0, *found) if all(map(math.isfinite, found)) else math.nan


def main() -> None:
    """The command."""
    warnings.simplefilter("ignore")
    names = set(sys.argv[1:]) or None
    counts = {"exact": 0, "refused": 0, "wrong": 0}
    for sample in (*operators(names), *modules(names)):
        for said in outcomes(sample):
            kind = "exact" if said == EXACT else "wrong" if said.startswith("wrong") else "refused"
            counts[kind] += 1
            if kind == "wrong" or (names and said != EXACT):
                print(f"{sample.name}: {said[:400]}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
