"""Random numbers: of the right distribution, independent of each other, the same on every mesh as in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.graph import arguments
from autopar.ir.mesh import Mesh
from autopar.ops.random_numbers import BITS, KINDS, drawn
from autopar.ops.random_recipes import RECIPES, recipe_for, shared_random
from autopar.ops.traits import is_random
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.harness import check_model

F = nn.functional
SEED = torch.tensor(11)


def numbers(
    kind: str, *shape: int, a: float = 0.0, b: float = 1.0, dtype: torch.dtype = torch.float64, **how: Any
) -> Tensor:
    place = {"seed": SEED, "site": 0, "index": [], "shape": []} | how
    return drawn(shape, place["seed"], kind, a, b, place["site"], place["index"], place["shape"], dtype)


# --- distributions -------------------------------------------------------------------------------------------

ROWS, COLUMNS = 500, 400
CDF: dict[str, tuple[float, float, Callable[[Tensor], Tensor]]] = {
    "uniform": (-1.0, 3.0, lambda x: (x + 1) / 4),
    "normal": (0.5, 2.0, lambda x: torch.special.ndtr((x - 0.5) / 2)),
    "log_normal": (0.5, 2.0, lambda x: torch.special.ndtr((x.log() - 0.5) / 2)),
    "exponential": (2.0, 0.0, lambda x: 1 - torch.exp(-2 * x)),
    "cauchy": (1.0, 0.5, lambda x: 0.5 + torch.atan((x - 1) / 0.5) / math.pi),
}


def distance(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Of Kolmogorov and Smirnov, in units of 1 / sqrt(n): 1.95 is exceeded once in a thousand."""
    x = sample.flatten().double().sort().values
    n, expected = len(x), cdf(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((expected - steps[:-1]).abs().max(), (steps[1:] - expected).abs().max())) * n**0.5


@pytest.mark.parametrize("kind", CDF)
def test_distributions(kind: str) -> None:
    a, b, cdf = CDF[kind]
    for site in range(3):
        assert distance(numbers(kind, ROWS, COLUMNS, a=a, b=b, site=site), cdf) < 1.95
    assert distance(numbers(kind, 1, 100_000, a=a, b=b), cdf) < 1.95
    assert distance(numbers(kind, 100_000, 1, a=a, b=b), cdf) < 1.95
    rows = numbers(kind, 4, 1000, 50, a=a, b=b)
    assert max(distance(row, cdf) for row in rows) < 1.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fewer_bits(dtype: torch.dtype) -> None:
    x = numbers("uniform", ROWS, COLUMNS, dtype=dtype)
    assert x.dtype == dtype and float(x.min()) >= 0 and float(x.max()) < 1
    assert torch.equal((x.double() * 2.0 ** BITS[dtype]) % 1, torch.zeros(ROWS, COLUMNS).double())
    assert abs(float(x.double().mean()) - (1 - 2.0 ** -BITS[dtype]) / 2) < 4 / (12 * ROWS * COLUMNS) ** 0.5
    assert bool((numbers("exponential", ROWS, COLUMNS, a=1.0, dtype=dtype) > 0).all())
    noise = numbers("normal", ROWS, COLUMNS, dtype=dtype).double()
    assert abs(float(noise.mean())) < 0.01 and abs(float(noise.std()) - 1) < 0.01


def test_whole_numbers() -> None:
    found = numbers("integers", ROWS, COLUMNS, a=-3, b=4, dtype=torch.int64)
    counts = torch.stack([(found == k).sum() for k in range(-3, 4)]).double()
    n = ROWS * COLUMNS
    assert counts.sum() == n
    assert float(((counts - n / 7) ** 2 / (n / 7)).sum()) < 22.5, "chi squared of 6 degrees, once in a thousand"
    far = numbers("integers", ROWS, COLUMNS, a=0, b=1 << 40, dtype=torch.int64)
    assert far.unique().numel() > 0.999 * n and int(far.max()) < 1 << 40
    steps = numbers("geometric", ROWS, COLUMNS, a=0.3)
    assert float(steps.min()) == 1 and abs(float(steps.mean()) - 1 / 0.3) < 4 * (0.7 / 0.09 / n) ** 0.5
    kept = numbers("keep", ROWS, COLUMNS, a=0.8)
    assert set(kept.unique().tolist()) == {0.0, 1.0} and abs(float(kept.mean()) - 0.8) < 4 * (0.16 / n) ** 0.5


def test_they_are_independent() -> None:
    """Between seeds, sites, neighbours, and of the two words that a number is made of."""
    base = numbers("normal", 512, 512)
    calls = [(torch.tensor(12), 0), (SEED, 1), (torch.tensor(11 + (1 << 40)), 0)]
    others = [numbers("normal", 512, 512, seed=seed, site=site) for seed, site in calls]
    shifted = [base.roll(by, dim) for by in (1, 2, 16) for dim in (0, 1)]
    for other in (*others, *shifted, base.t()):
        assert abs(float((base * other).mean())) < 5 / 512
    high = numbers("uniform", 512, 512)
    low = high * 2**27 % 1
    assert abs(float(((high - 0.5) * (low - 0.5)).mean() * 12)) < 5 / 512 and distance(low, lambda x: x) < 1.95


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_does_not_matter(kind: str) -> None:
    whole = numbers(kind, 6, 10, 8, a=0.4, b=7.0)
    index = [torch.tensor([1, 4]), torch.arange(10), torch.tensor([0, 3, 7])]
    part = numbers(kind, 2, 10, 3, a=0.4, b=7.0, index=index, shape=[6, 10, 8])
    assert torch.equal(part, whole[[1, 4]][:, :, [0, 3, 7]])
    assert numbers(kind, a=0.4, b=7.0).shape == () and numbers(kind, 0, 3, a=0.4, b=7.0).shape == (0, 3)


# --- operators -----------------------------------------------------------------------------------------------


def eager(draw: Callable[[], Tensor], seed: int = 5) -> Tensor:
    with shared_random(seed):
        return draw()


PROBABILITIES = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4])
OPERATORS: dict[str, tuple[Callable[[], Tensor], float, float]] = {  # with mean and variance
    "rand": (lambda: torch.rand(300, 300), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(300, 300), 0, 1),
    "rand_like": (lambda: torch.rand_like(torch.empty(300, 300)), 1 / 2, 1 / 12),
    "randn_like": (lambda: torch.randn_like(torch.empty(300, 300)), 0, 1),
    "randint": (lambda: torch.randint(2, 8, (300, 300)), 4.5, 35 / 12),
    "randint_like": (lambda: torch.randint_like(torch.empty(300, 300), 6), 2.5, 35 / 12),
    "random_": (lambda: torch.empty(300, 300).random_(2, 8), 4.5, 35 / 12),
    "bernoulli_": (lambda: torch.empty(300, 300).bernoulli_(0.3), 0.3, 0.21),
    "bernoulli of each": (lambda: torch.full((300, 300), 0.3).bernoulli(), 0.3, 0.21),
    "bernoulli_ of each": (lambda: torch.empty(300, 300).bernoulli_(torch.full((300, 300), 0.3)), 0.3, 0.21),
    "normal": (lambda: torch.normal(2.0, 3.0, (300, 300)), 2, 9),
    "normal of each": (lambda: torch.normal(torch.full((300, 300), 2.0), torch.full((300, 1), 3.0)), 2, 9),
    "normal by each": (lambda: torch.normal(2.0, torch.full((300, 300), 3.0)), 2, 9),
    "normal_": (lambda: torch.empty(300, 300).normal_(2.0, 3.0), 2, 9),
    "uniform_": (lambda: torch.empty(300, 300).uniform_(1.0, 3.0), 2, 1 / 3),
    "exponential_": (lambda: torch.empty(300, 300).exponential_(2.0), 1 / 2, 1 / 4),
    "log_normal_": (lambda: torch.empty(300, 300).log_normal_(0.0, 0.5).log(), 0, 0.25),
    "geometric_": (lambda: torch.empty(300, 300).geometric_(0.3), 1 / 0.3, 0.7 / 0.09),
    "cauchy_": (lambda: torch.empty(300, 300).cauchy_().atan(), 0, math.pi**2 / 12),
    "multinomial": (lambda: torch.multinomial(PROBABILITIES.expand(90000, 5), 1), 2.7, 2.01),
    "multinomial, again": (lambda: torch.multinomial(PROBABILITIES.expand(30000, 5), 3, replacement=True), 2.7, 2.01),
    "gumbel": (lambda: F.gumbel_softmax(PROBABILITIES.log().expand(90000, 5), hard=True).argmax(-1), 2.7, 2.01),
    "dropout": (lambda: F.dropout(torch.ones(300, 300), 0.2), 1, 0.25),
    "randperm": (lambda: torch.randperm(90000), 89999 / 2, (90000**2 - 1) / 12),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """Mean and variance of 90000 numbers, as torch's own has them; another seed, other numbers."""
    draw, mean, variance = OPERATORS[name]
    found, own = eager(draw), draw()
    assert found.dtype == own.dtype and found.shape == own.shape
    allowed = 5 * (variance / found.numel()) ** 0.5
    assert name == "randperm" or abs(float(found.double().mean()) - mean) < allowed
    assert abs(float(found.double().var()) / variance - 1) < 0.05
    assert torch.equal(found, eager(draw)) and not torch.equal(found, eager(draw, 6))


def test_without_replacement_nothing_comes_twice() -> None:
    found = eager(lambda: torch.multinomial(PROBABILITIES.expand(30000, 5), 3))
    assert all(len(set(row)) == 3 and 2 not in row for row in found[:100].tolist())
    second = (found[:, 1] == 4).double().mean()
    expected = sum(p * 0.4 / (1 - p) for p in (0.1, 0.2, 0.3))
    assert abs(float(second) - expected) < 5 * (0.25 / 30000) ** 0.5
    order = eager(lambda: torch.randperm(1000))
    assert torch.equal(order.sort().values, torch.arange(1000)) and not torch.equal(order, torch.arange(1000))


def test_every_operator_that_draws_has_a_recipe_or_none() -> None:
    """What torch says of its operators: those without a recipe reject, or are made of others."""
    tagged = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if is_random(op) and recipe_for(op)[0] is None:
                tagged.add(name.rstrip("_"))
    assert {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu", "rrelu_with_noise"} <= tagged
    assert not tagged & {str(packet).removeprefix("aten.") for packet in RECIPES}


# --- models --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Something random between two linears."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], inner: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.middle = nn.Linear(8, 16), nn.Linear(16, 4), middle
        self.inner = inner() if inner is not None else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.middle(self.inner, self.up(x))), y)


def drop_path(_: Any, h: Tensor) -> Tensor:
    """timm's: one coin for each example."""
    coin = h.new_empty((h.shape[0],) + (1,) * (h.dim() - 1)).bernoulli_(0.7)
    return h * coin.div_(0.7)


def stochastic_depth(_: Any, h: Tensor) -> Tensor:
    """As in models of transformers."""
    return h / 0.7 * (0.7 + torch.rand((h.shape[0], 1), dtype=h.dtype)).floor_()


MODELS: dict[str, tuple[Any, ...]] = {
    "drop path": (drop_path,),
    "stochastic depth": (stochastic_depth,),
    "noise": (lambda m, h: h + torch.randn_like(h) * torch.rand_like(h),),
    "noise of a size": (lambda m, h: h + torch.randn(h.shape) + torch.randn(1, 16),),
    "noise on a weight": (lambda m, h: F.linear(h, m.weight + torch.randn_like(m.weight)), lambda: nn.Linear(16, 16)),
    "coins by value": (
        lambda m, h: h * torch.bernoulli(h.sigmoid()) + torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    ),
    "gumbel": (lambda m, h: F.gumbel_softmax(h, tau=0.5) + F.gumbel_softmax(h, hard=True) * h,),
    "time steps": (lambda m, h: h + m(torch.randint(0, 10, (h.shape[0],))), lambda: nn.Embedding(10, 16)),
    "written": (lambda m, h: h * torch.empty_like(h).uniform_(-1, 3).add_(torch.empty_like(h).exponential_()),),
    "chosen": (lambda m, h: h * torch.multinomial(h.softmax(-1), 3).sum(-1, keepdim=True),),
    "channels dropped": (lambda m, h: m(h.reshape(-1, 4, 2, 2)).reshape(-1, 16), lambda: nn.Dropout2d(0.4)),
    "alpha dropout": (lambda m, h: m(h), lambda: nn.AlphaDropout(0.3)),
    "a variational bottleneck": (lambda m, h: torch.distributions.Normal(h, h.exp()).rsample(),),
    "classes": (lambda m, h: h * torch.distributions.Categorical(logits=h).sample().unsqueeze(-1),),
    "with dropout": (lambda m, h: F.dropout(h + torch.randn_like(h), 0.3) * torch.rand(h.shape[0], 1),),
    "unused ones": (lambda m, h: (torch.rand(3), F.dropout(h, 0.3), F.dropout(h, 1.0), h * torch.rand_like(h))[3],),
}  # fmt: skip
MESHES = {"dp=2,tp=2": {"zero": 3}, "dp=2": {"microbatches": 2}}


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(8, d, generator=g, dtype=torch.float64) for n, d in (("x", 8), ("y", 4))}


@pytest.mark.parametrize(
    "name, mesh",
    [  # each model on one of them, in turn
        pytest.param(name, mesh, marks=() if (i + k) % 2 else pytest.mark.full)
        for i, name in enumerate(MODELS)
        for k, mesh in enumerate(MESHES)
    ],
)
def test_models(name: str, mesh: str) -> None:
    model = Net(*MODELS[name]).double()
    assert check_model(model, batch(), Mesh.parse(mesh), Options(**MESHES[mesh])).worst < 1e-12


def test_a_permutation_of_the_batch_mixes_samples() -> None:
    model = Net(lambda m, h: h + h[torch.randperm(h.shape[0])].tanh()).double()
    assert check_model(model, batch(), Mesh.of(dp=2)).worst < 1e-12
    with pytest.raises(ValueError, match=r"^microbatches: samples of different microbatches meet"):
        compile_model(model, batch(), Mesh.of(dp=2), Options(microbatches=2), lift_to_float64=True)


# --- what is refused, and what is left as it was -------------------------------------------------------------


@pytest.mark.parametrize(
    "middle, said",
    [
        (lambda m, h: h * torch.poisson(h.abs()), r"aten.poisson"),
        (lambda m, h: F.rrelu(h, training=True), r"aten.rrelu"),
        (lambda m, h: h + torch.empty_like(h).random_(), r"aten.random.* its bounds must be constant"),
        (lambda m, h: h * torch._standard_gamma(h.exp()), r"aten._standard_gamma"),
    ],
    ids=["poisson", "rrelu", "no bounds", "gamma"],
)
def test_refused(middle: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^normalize: random numbers must not depend on.*{said}"):
        compile_model(Net(middle), {n: x.float() for n, x in batch().items()}, Mesh.of(dp=2))


def test_sites_are_counted_as_an_eager_run_counts() -> None:
    model = Net(*MODELS["unused ones"]).double()
    gm = Normalize().apply(capture(model, batch(), lift_to_float64=True))
    calls = [arguments(n) for n in gm.graph.nodes if n.op == "call_function"]
    found = [known["site"] for known in calls if "site" in known]
    with shared_random(0) as counted:
        model(**batch())  # whose own generator is left alone
    assert found == [counted.site - 1] == [2]
    text = [n.format_node() for n in gm.graph.nodes]
    assert [n.format_node() for n in Normalize().apply(gm).graph.nodes] == text, "no-op on a normalised graph"


def test_distributions_check_their_values_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns it off for good
    capture(Net(*MODELS["a variational bottleneck"]), {n: x.float() for n, x in batch().items()})
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))


def test_a_kernel_of_attention_that_the_model_chose_draws_nothing_at_a_rate_of_zero() -> None:
    """Within a choice of its own (x-transformers makes one), torch's attention is one operator that may draw."""
    q = torch.randn(2, 3, 4, 8)

    def attended() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q)

    with shared_random(7) as numbers:
        found = attended()
    assert numbers.site == 0
    torch.testing.assert_close(found, attended())


class Dropped(nn.Module):
    """Stochastic depth as timm writes it; at this rate the call is the operator's default."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(self.keep)
        return (x + self.layer(x) * kept.div_(self.keep)).square().mean()


@pytest.mark.parametrize("keep", [0.5, 0.7])
def test_stochastic_depth(keep: float) -> None:
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    assert check_model(Dropped(keep).double(), batch, Mesh.of(dp=2)).worst < 1e-10
