"""What is no model, no mesh, no option, no batch: each refused in one sentence, before anything is compiled."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli.compiling import asked_options
from autopar.cli.shared_arguments import add_model
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED
from autopar.plan import Plan
from autopar.precision import PRECISIONS
from tests.support.plain_models import EXACT, Net, Tied, build, gap, gradients, numbers, part, tokens
from tests.support.ranks import run_ranks


def refusals(cases: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each case raises, as "Type: message"."""
    out = {}
    for name, case in cases.items():
        try:
            out[name] = f"nothing, but {case()!r}"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def compare(found: dict[str, str], expected: dict[str, str]) -> None:
    wrong = {n: text for n, text in found.items() if not text.startswith(f"ValueError: {expected[n]}")}
    assert found.keys() == expected.keys() and not wrong, wrong
    assert all("\n" not in text and len(text) < 590 for text in found.values())


# --- parallelize and init_mesh ------------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def bad_calls() -> None:
    net, batch = build(Net), numbers()
    mesh = autopar.init_mesh("cpu", dp=1)
    parallel = autopar.parallelize(net, mesh, example_batch=batch)
    put: Any = autopar.parallelize
    init: Any = autopar.init_mesh
    of: Any = lambda model, **more: lambda: put(model, mesh, example_batch=batch, **more)  # noqa: E731
    meshes = {"text": "dp=1", "dict": {"dp": 1}, "ours": Mesh.of(dp=1), "none": None}
    compare(
        refusals({name: lambda mesh=mesh: put(net, mesh, example_batch=batch) for name, mesh in meshes.items()}),
        dict.fromkeys(meshes, "mesh: needs a torch DeviceMesh, found "),
    )
    compare(
        refusals(
            {
                "function": of(lambda x: x),
                "class": of(Net),
                "parallel": of(parallel),
                "inside": of(Holds(parallel)),
                "lazy": of(nn.LazyLinear(3)),
                "data parallel": of(nn.DataParallel(net)),
            }
        ),
        {
            "function": "parallelize: needs a torch.nn.Module, found a function; ",
            "class": "parallelize: needs a model, found the class Net; pass Net(...)",
            "parallel": "parallelize: needs a model that is not parallelized yet, found a ParallelModule; ",
            "inside": "parallelize: needs a model that is not parallelized yet, found a ParallelModule at inner; ",
            "lazy": "parallelize: needs initialized parameters, found weight, ",
            "data parallel": "parallelize: replaces DataParallel, found one; pass its model.module",
        },
    )
    compare(
        refusals(
            {
                "seed": of(net, seed=1.5),
                "large seed": of(net, seed=2**70),
                "lift_to_float64": of(net, lift_to_float64="yes"),
                "backend": of(net, backend=None),
                "dump": of(net, dump=5),
                "plan": of(net, plan="plan.json"),
                "example": lambda: put(net, mesh, example_batch=[1]),
                "names": lambda: put(net, mesh, example_batch={"x": batch["x"]}),
                "unknown": of(net, zeros=3),
            }
        ),
        {
            "seed": "seed: expected a whole number of at least 0 and at most ",
            "large seed": "seed: expected a whole number of at least 0 and at most ",
            "lift_to_float64": "lift_to_float64: expected True or False, found 'yes'",
            "backend": "backend: expected 'eager', 'inductor', 'cudagraphs' or 'inductor+cudagraphs', found None",
            "dump": "dump: expected the path of a folder, found 5",
            "plan": "plan: needs a Plan, found a str; read one with Plan.from_json(text)",
            "example": "example_batch: needs the keyword arguments of the forward, found a list; ",
            "names": "batch: Net.forward(x, target) needs target, found x; pass it by name",
            "unknown": "parallelize: unknown option 'zeros'; the options are ",
        },
    )
    compare(
        refusals(
            {
                "as torch": lambda: init((2,), ("dp",)),
                "number": lambda: init(2),
                "device": lambda: init("tpu", dp=1),
                "timeout": lambda: init("cpu", "soon", dp=1),
                "no time": lambda: init("cpu", -1, dp=1),
                "size": lambda: init("cpu", dp="1"),
                "fraction": lambda: init("cpu", dp=1.0),
                "bool": lambda: init("cpu", dp=True),
                "axis": lambda: init("cpu", tensor=1),
                "in time": lambda: init("cpu", mb=1),
            }
        ),
        {
            "as torch": "init_mesh: needs the device first and the axes by name, found (2,); write ",
            "number": "init_mesh: needs the device first and the axes by name, found 2; ",
            "device": "init_mesh: expected the device 'cpu' or 'cuda', found 'tpu'",
            "timeout": "timeout: expected seconds above 0, found 'soon'; 600 is the default",
            "no time": "timeout: expected seconds above 0, found -1",
            "size": "mesh: axis 'dp' needs a whole number as its size, found '1'",
            "fraction": "mesh: axis 'dp' needs a whole number as its size, found 1.0",
            "bool": "mesh: axis 'dp' needs a whole number as its size, found True",
            "axis": "mesh: unknown axis 'tensor'; the axes are pp, dp_replicate, dp, cp, ep, tp",
            "in time": "mesh: nothing is sharded on axis 'mb', found mb=1; the axes are pp, dp_replicate, dp, cp",
        },
    )


def test_calls_that_cannot_be() -> None:
    run_ranks(1, bad_calls)


OPTIONS: list[tuple[str, Any, str]] = [
    ("zero", "3", "expected 0, 1, 2 or 3, found '3'"),
    ("zero", True, "expected 0, 1, 2 or 3, found True"),
    ("zero", 3.0, "expected 0, 1, 2 or 3, found 3.0"),
    ("microbatches", "2", "expected a whole number of at least 1, found '2'"),
    ("microbatches", 2.0, "expected a whole number of at least 1, found 2.0"),
    ("microbatches", True, "expected a whole number of at least 1, found True"),
    ("microbatches", torch.tensor(2), "expected a whole number of at least 1, found a Tensor"),
    ("sequence_parallel", "no", "expected True or False, found 'no'"),
    ("sequence_parallel", 1, "expected True or False, found 1"),
    ("precision", torch.bfloat16, "expected a text, found a dtype"),
    (
        "precision",
        "half",
        "expected 'none', 'bf16', 'bf16_pure', 'fp16', 'fp8', 'fp8_delayed', 'fp8_row', 'mxfp8', "
        "or an autopar.Precision, found 'half'",
    ),
    ("replicate_ops", "aten.sinc.default", r"expected a tuple of names such as \('aten.sinc.default',\)"),
    ("replicate_ops", [1], "expected a tuple of names"),
    ("bucket_bytes", "25 boxes", "expected a number of bytes, such as 80e9, 80GB or 75GiB, found '25 boxes'"),
    ("activation_checkpoint", 1, "expected a text, found 1"),
    ("bucket_bytes", 0.5, "expected a whole number of at least 0, found 0.5"),
    ("schedule", None, "expected a text, found None"),
    ("split_points", "layers.1", r"expected a tuple of names such as \('layers.1',\)"),
    ("virtual_stages", -1, "expected a whole number of at least 0, found -1"),
    ("token_slices", "2", "expected a whole number of at least 0, found '2'"),
    ("token_slices", [4, 0], "expected a whole number of at least 1, found 0"),
    ("reshard_after_forward", None, "expected 'auto', False or True, found None"),
    ("reshard_after_forward", 1, "expected 'auto', False or True, found 1"),
    ("memory_limit", float("nan"), "expected a whole number of at least 0, found nan"),
    ("attention", 1, "expected a text, found 1"),
    ("cp_load_balance", "striped", "expected 'auto', 'contiguous' or 'zigzag', found 'striped'"),
    ("topology", {}, "expected a text, found a dict"),
]


@pytest.mark.parametrize("name, value, message", OPTIONS, ids=[f"{n}={v!r}"[:40] for n, v, _ in OPTIONS])
def test_options_have_types(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        autopar.Options(**{name: value})


READ: dict[str, tuple[str, Any]] = {  # of the command line
    "zero": ("3", 3), "microbatches": ("4", 4), "replicate_ops": ("aten.sinc.default", ("aten.sinc.default",)),
    "bucket_bytes": ("1e6", 10**6), "schedule": ("zb_h1", "zb_h1"), "split_points": ("a, b", ("a", "b")),
    "virtual_stages": ("2", 2), "async_tp": ("True", True), "share_encoders": ("False", False),
    "deal_images": ("False", False),
    "token_slices": ("9,7", (9, 7)), "reshard_after_forward": ("True", True), "reduce_grads": ("step", "step"),
    "memory_limit": ("80e9", 80 * 10**9), "precision": ("bf16", PRECISIONS["bf16"]),
    "attention": ("ring+token_ring", "ring+token_ring"), "cp_load_balance": ("zigzag", "zigzag"),
    "cp_recurrences": ("channels", "channels"),
    "topology": ("cp=ring", "cp=ring"), "batch_dims": ("x=1,past.0=none", (("past.0", None), ("x", 1))),
    "static_inputs": ("grid,kinds", ("grid", "kinds")), "documents": ("5,3", (5, 3)),
    "activation_checkpoint": ("full", "full"),
    "loss_chunks": ("8", 8), "tiles": ("8", 8), "replicas": ("4", 4),
    "activation_offload": ("1GB", 10**9), "token_dispatcher": ("alltoall_dedup", "alltoall_dedup"),
    "expert_axis": ("dp", "dp"), "target_hardware": ("h100", "H100"), "capacity_factor": ("1.25", 1.25),
    "aux_loss_scope": ("microbatch",) * 2,
}  # fmt: skip


def test_the_command_line_takes_every_option(tmp_path: Path) -> None:
    """One declaration: what a text means, what holds without it, and the words of both."""
    parser = argparse.ArgumentParser()
    add_model(parser, seq=16, batch=None, dtype="float64")
    (tmp_path / "config.json").write_text("{}")
    given = ["--config", str(tmp_path / "config.json"), "--mesh", "dp=2"]
    assert asked_options(parser.parse_args(given)) == autopar.Options()
    for name, (text, _) in READ.items():
        given += [f"--{name.replace('_', '-')}", text]
    flags = {"sequence_parallel": True, "optimizer_cpu_offload": True}
    found = asked_options(parser.parse_args([*given, "--sequence-parallel", "--optimizer-cpu-offload"]))
    assert found == autopar.Options(**flags, **{name: value for name, (_, value) in READ.items()})
    assert {*READ, *flags} == set(DECLARED)
    text = " ".join(parser.format_help().split()).replace("- ", "-")
    for name, option in DECLARED.items():
        assert option.help.replace("- ", "-") in text and f"\n{name}: {option.help}" in str(autopar.Options.__doc__)


def test_options_take_what_means_the_same() -> None:
    options = autopar.Options(microbatches=np.int64(2), memory_limit=80e9, token_slices=[4, 4], split_points=["a"])  # type: ignore[arg-type]
    assert options == autopar.Options(microbatches=2, memory_limit=80 * 10**9, token_slices=(4, 4), split_points=("a",))
    for text, value in {"80GB": 80 * 10**9, "75GiB": 75 * 2**30, "1.5 kb": 1500, "80e9": 80 * 10**9, "7": 7}.items():
        assert autopar.Options(memory_limit=text).memory_limit == value  # type: ignore[arg-type]
    assert type(options.microbatches) is type(options.memory_limit) is int


def test_calls_beside_parallelize() -> None:
    plan = Plan(Mesh.of(tp=2), "", parameters={"w": {}})
    for call, message in (
        (lambda: autopar.launch(None), "launch: needs a function, found None"),  # type: ignore[arg-type]
        (lambda: autopar.launch(print, "2"), "nproc: expected a whole number of at least 1, found '2'"),  # type: ignore[arg-type]
        (lambda: Plan.from_json(3), "plan: expected the JSON of a plan: needs a text, found a int"),  # type: ignore[arg-type]
        (lambda: plan.override(3), "plan: changes are placements by name and axis, .* found 3"),  # type: ignore[arg-type]
        (lambda: plan.override({"w": "I"}), "plan: changes are placements by name and axis"),  # type: ignore[dict-item]
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- batches ------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Nested(nn.Module):
    """Takes its batch in structures."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 8)

    def forward(self, pair: Pair, more: dict[str, Tensor], *, scale: float = 1.0) -> Tensor:
        return nn.functional.mse_loss(self.head(pair.left + more["shift"]), pair.right) * scale


def nested() -> dict[str, Any]:
    batch = numbers()
    shift = torch.arange(12.0, dtype=torch.float64).expand(8, 12)  # one row, eight times
    return {"pair": Pair(batch["x"].t().contiguous().t(), batch["target"]), "more": OrderedDict(shift=shift)}


def bad_batches() -> None:
    net, batch = build(Net), numbers()
    parallel = autopar.parallelize(net, autopar.init_mesh("cpu", dp=1), example_batch=batch)
    x, target = batch["x"], batch["target"]
    values = {
        "numpy": x.numpy(),
        "list of arrays": [x.numpy()],
        "set": {1},
        "object": nn.ReLU(),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "gradient": x.clone().requires_grad_(),
        "itself": (loop := []),
    }
    loop.append(loop)
    cases: dict[str, Callable[[], Any]] = {
        name: lambda value=value: parallel.train_step(x=value, target=target)  # type: ignore[misc]
        for name, value in values.items()
    }
    cases |= {
        "missing": lambda: parallel.train_step(x=x),
        "nothing": lambda: parallel.eval_step(),
        "a dict": lambda: parallel.train_step(batch),
        "unknown": lambda: parallel(x=x, targets=target),
        "too many": lambda: parallel(x, target, x),
        "twice": lambda: parallel(x, x=x, target=target),
    }
    compare(
        refusals(cases),
        {
            "numpy": "batch: x needs to be a tensor or a number, text or None, found a numpy.ndarray; pass ",
            "list of arrays": "batch: x.0 needs to be a tensor or a number, text or None, found a numpy.ndarray; ",
            "set": "batch: x needs to be a tensor or a number, text or None, found a set; ",
            "object": "batch: x needs to be a tensor or a number, text or None, found a torch.nn.modules.",
            "meta": "batch: x needs values, found a tensor on the meta device, which has none; ",
            "sparse": "batch: x needs to be dense, found a sparse tensor; pass x.to_dense()",
            "gradient": "batch: x requires a gradient, which only parameters get; ",
            "itself": "batch: needs finite nesting, found a list or dict that contains itself",
            "missing": "batch: Net.forward(x, target) needs target, found x; pass it by name",
            "nothing": "batch: Net.forward(x, target) needs x, target, found nothing; ",
            "a dict": "batch: Net.forward(x, target) takes its arguments by name, found a dict of them; ",
            "unknown": "batch: Net.forward(x, target) takes no 'targets'; did you mean 'target'?",
            "too many": "batch: Net.forward(x, target) takes 2 positional arguments, found 3; pass them by name",
            "twice": "batch: Net.forward(x, target) takes 'x' once, found it by position and by name",
        },
    )
    assert not parallel.compiled()


def test_batches_that_cannot_be() -> None:
    run_ranks(1, bad_batches)


def refused_by_operators() -> None:
    mesh, batch, words = autopar.init_mesh("cpu", dp=1), numbers(), tokens()
    net = autopar.parallelize(build(Net), mesh, example_batch=batch)
    tied = autopar.parallelize(build(Tied), mesh, example_batch=words)
    x, target, ids = batch["x"], batch["target"], words["tokens"]
    here = "/.*plain_models.py:[0-9]+ in forward, `.*`: "
    cases: dict[str, tuple[Callable[[], Any], str]] = {
        "dtype": (
            lambda: net.train_step(x=x.float(), target=target),
            f"capture: {here}needs operands of one dtype, found x float32 and first.weight float64 and ",
        ),
        "integers": (
            lambda: net(x=x.long(), target=target),
            f"capture: {here}needs operands of one dtype, found x int64",
        ),
        "shape": (
            lambda: net.eval_step(x=x[:, :5], target=target),
            f"capture: {here}the inner sizes of a matrix product differ: ",
        ),
        "text": (
            lambda: net.train_step(x="x", target=target),
            f"capture: {here}needs a tensor as 'input', found a str",
        ),
        "rows": (lambda: net.train_step(x=x[:4], target=target), f"capture: {here}needs sizes that broadcast to "),
        "floating ids": (
            lambda: tied.train_step(tokens=ids.double(), labels=ids),
            f"capture: {here}needs indices of int64, ",
        ),
        "ids": (
            lambda: tied.train_step(tokens=ids + 16, labels=ids),
            r'step 1: ids of "tokens" must lie in 0 \.\. 15, '
            f"the rows of its embedding, found .* \\(aten.embedding.default at {here[:-2]}\\); correct the batch",
        ),
        "labels": (
            lambda: tied.train_step(tokens=ids, labels=ids - 1),
            r'step 2: labels of "labels" must lie in 0 \.\. 15, or be -100, found -1 ',
        ),
    }
    for name, text in refusals({name: case for name, (case, _) in cases.items()}).items():
        assert re.match(f"ValueError: {cases[name][1]}", text), text
    assert len(net.compiled()) == 0 and len(tied.compiled()) == 1


def test_operators_that_refuse_name_the_line() -> None:
    run_ranks(1, refused_by_operators)


def orders() -> None:
    sizes = {"dp": 2}
    model, batch = build(Net), numbers()
    mine = part(batch, sizes)
    turned = dict(reversed(mine.items()))
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 30.0, **sizes), example_batch=turned)
    model(**batch)["loss"].backward()
    for first, second in ((mine, turned), (turned, mine)):
        given = first if torch.distributed.get_rank() else second
        loss = parallel(**given)["loss"]
    loss.backward()
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT and len(parallel.compiled()) == 1


def test_the_order_of_keys_is_nothing() -> None:
    run_ranks(2, orders)


def structures() -> None:
    sizes = {"dp": 2}
    model, batch = build(Nested), nested()
    cut = lambda x: x.chunk(2)[torch.distributed.get_rank()]  # noqa: E731
    mine = {"more": {"shift": cut(batch["more"]["shift"])}, "pair": Pair(*map(cut, batch["pair"]))}
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 30.0, **sizes), example_batch=mine)
    for scale in (1.0, 2.0, 1.0):
        model.zero_grad(), parallel.zero_grad()
        loss = model(**batch, scale=scale)
        loss.backward()
        found = parallel.train_step(**mine, scale=scale)
        assert abs(float(found) - float(loss)) < EXACT and gap(parallel.full_gradients(), gradients(model)) < EXACT
    assert len(parallel.compiled()) == 2  # constants are part of the graph
    other = {**mine, "pair": tuple(mine["pair"])}  # no pair.left
    with pytest.raises(ValueError, match=r"capture: .*a tuple has no left"):
        parallel.train_step(**other)
    expected = r"rank 1: .*'pair: \(float64 \[2, 12\], float64 \[4, 8\]\)'.*against rank 0: .*Pair.*float64 \[4, 12\]"
    if torch.distributed.get_rank():
        mine["pair"] = (mine["pair"].left[:2], mine["pair"].right)
    with pytest.raises(ValueError, match=expected) as raised:
        parallel.train_step(**mine)
    assert "TreeSpec" not in str(raised.value)


def test_nested_batches_and_strides() -> None:
    run_ranks(2, structures)
