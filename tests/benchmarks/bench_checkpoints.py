"""Recompute time over peak memory: what autopar chooses against torch's partitioner, on the same joint graphs.

Torch's min-cut partitioner makes F and B at budgets 0 to 1; autopar gets the peak that came out as its limit. Peaks are
those of a walk over either's graphs (`autopar.ir.storages`), gradients included; times of what B recomputes are by
roofline, of products alone, and measured: F and B run on one process, in turns.

    python tests/benchmarks/bench_checkpoints.py [--only llama] [--rounds 3] [--small]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch
from common import DOCS, interleaved, publish
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

import autopar.models.hf  # noqa: F401  (its adapter)
from autopar.ac_policies import AC_POLICIES
from autopar.compile import model as compiling
from autopar.compile.layer_options import find_ways
from autopar.compile.layer_tensors import JointInfo, chosen_by, layers_of
from autopar.compile.model import compile_model
from autopar.compile.stages import StageBuilder
from autopar.cost.hardware import Links
from autopar.ir.graph import output_node, placeholders
from autopar.ir.live_values import peak_of_values
from autopar.ir.mesh import Mesh
from autopar.ops.traits import PRODUCTS
from autopar.options import Options
from autopar.passes.autodiff.joint import Joint
from autopar.planner.recompute.layer_solver import MemoryBudget, least_time
from autopar.steps.graphs import grad, saved

BUDGETS = [i / 10 for i in range(11)]
PICTURE = DOCS.parent / "pictures" / "measured" / "checkpoints.svg"


def llama(layers: int = 12) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=1024, n_embd=256, n_layer=8, n_head=4, n_positions=256, use_cache=False)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=1024, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0,
            use_cache=False,
        )
    )  # fmt: skip


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=1024, hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
            use_cache=False,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "qwen3_moe": qwen3_moe}


@dataclass
class Split:
    """F and B, and what B recomputes: in shares of the time of F, by the roofline and of products alone."""

    forward: GraphModule
    backward: GraphModule
    peak: int
    roofline: float
    products: float
    again: frozenset[Node] = frozenset()


class Subject:
    """A model's joint graph, and what is measured on it."""

    def __init__(self, name: str, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, MODELS[name]().eval()  # without dropout: torch would draw other masks again
        ids = torch.randint(0, 1024, (rows, tokens))
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        with _maker() as found:
            made = compile_model(self.model, self.batch, Mesh.of(), Options(), train=True, outputs=())
        self.names = {s.node: s.name for s in made.local.meta["signature"].inputs}
        self.constants = made.constants
        derived = found[0].derived(0)
        self.joint: Joint = derived.joint
        self.facts = JointInfo(self.joint, layers_of(derived.calls), Links(Mesh.of()))
        self.ways = find_ways(self.facts, {})
        self.seconds = {n.name: s for n, s in self.facts.seconds.items() if not self.joint.is_free(n)}
        self.products = {n.name for n in self.joint.order if n.target in PRODUCTS or "attention" in str(n.target)}

    def shares(self, again: Sequence[str]) -> tuple[float, float]:
        """Of the time of F, by roofline and of products alone."""
        some = {n: s for n, s in self.seconds.items() if n in self.products}
        return tuple(sum(t.get(n, 0.0) for n in again) / sum(t.values()) for t in (self.seconds, some))  # type: ignore[return-value]

    def split(self, again: frozenset[Node]) -> Split:
        """Ours, for recomputation."""
        joint = self.joint
        joint.recomputed = again
        forward = joint.forward()
        known = {**joint.primals, **{n: saved(n.name) for n in joint.saved}}
        known |= {t: grad(t.name) for t in joint.tangents}
        results = [(grad(n), g) for n, g in joint.gradients.items()]
        backward = joint.graph_of(joint.dependent, results, known, "B").graph
        made = joint.closure(joint.wanted, again)[1]
        kept = {n.name for n in joint.saved} | {n.name for n in joint.tangents}
        return Split(
            forward, backward, self._peak(forward, backward, kept), *self.shares([n.name for n in made]), again
        )

    def _peak(self, forward: GraphModule, backward: GraphModule, kept: set[str]) -> int:
        """Parameters and inputs are there anyway."""
        inputs = {n.name for n in placeholders(forward)}
        others = {n.name for n in placeholders(backward) if n.name not in kept}
        return max(peak_of_values(forward, inputs), peak_of_values(backward, others))

    def torchs(self, budget: float) -> Split:
        """Torch's partitioner at a budget."""
        gm = copy.deepcopy(self.joint.gm)
        with functorch.patch(activation_memory_budget=budget), _ours_may_be_made_again():
            forward, backward = min_cut_rematerialization_partition(gm, (), num_fwd_outputs=len(self.joint.outs))
        primals = {n.name for n in self.joint.primals}
        kept = {n.name for n in placeholders(backward)} - primals
        again = [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in self.seconds]
        return Split(forward, backward, self._peak(forward, backward, kept), *self.shares(again))

    def under(self, limit: int) -> Split:
        """Ours, under a limit."""
        room: float = limit
        for _ in range(6):
            choice = least_time(self.ways, [MemoryBudget(room)])
            assert choice is not None, f"{self.name}: nothing fits {limit:,}"
            again = (x.way(k).again for x, k in zip(self.facts.layers, choice, strict=True))
            found = self.split(frozenset().union(*again))
            if found.peak <= limit:
                return found
            room -= found.peak - limit
        raise AssertionError(f"{self.name}: {limit:,} is never kept")

    def policy(self, name: str) -> Split:
        """Of a registered policy."""
        return self.split(chosen_by(AC_POLICIES[name], name, self.facts).again)


@contextmanager
def _maker() -> Iterator[list[StageBuilder]]:
    found: list[StageBuilder] = []
    before = compiling.with_checkpoints

    def noted(maker: StageBuilder, finished: Any) -> Any:
        found.append(maker)
        return before(maker, finished)

    compiling.with_checkpoints = noted  # type: ignore[assignment]
    try:
        yield found
    finally:
        compiling.with_checkpoints = before


@contextmanager
def _ours_may_be_made_again() -> Iterator[None]:
    """Torch's partitioner may make our operators again, and knows what they cost."""
    import torch._functorch.partitioners as partitioners
    from torch.utils.flop_counter import flop_registry

    ours = [getattr(torch.ops.autopar, name) for name in ("attention", "grouped_mm", "cross_entropy")]
    before, known = partitioners.get_default_op_list, dict(flop_registry)

    def with_ours() -> Any:
        found = before()
        found.recomputable_ops.update(ours)
        found.compute_intensive_ops.update(ours[:2])
        return found

    def attention_flops(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shape, width, wide = query, key[-1], value[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return 2 * rows * key[-2] * (width + wide)

    def grouped_flops(rows: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * rows[0] * rows[1] * out_shape[-1]

    partitioners.get_default_op_list = with_ours  # type: ignore[assignment]
    from torch.utils.flop_counter import shape_wrapper

    flop_registry[ours[0]] = shape_wrapper(attention_flops)
    flop_registry[ours[1]] = shape_wrapper(grouped_flops)
    try:
        yield
    finally:
        partitioners.get_default_op_list = before
        flop_registry.clear()
        flop_registry.update(known)


# --- measured on one process --------------------------------------------------------------------------------


class Runner:
    """F and B of a split, on the numbers of the model."""

    def __init__(self, subject: Subject, split: Split) -> None:
        self.split, joint = split, subject.joint
        held = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers()), **subject.batch}
        held |= subject.constants
        self.values = {n.name: held[subject.names[name]].detach() for n, name in joint.primals.items()}
        self.by_name = {name: n.name for n, name in joint.primals.items()}
        self.tangents = [torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in joint.tangents]
        self.count = len(joint.outs)

    @torch.no_grad()
    def __call__(self) -> list[torch.Tensor | None]:
        """The gradients."""
        forward, backward = self.split.forward, self.split.backward
        given = [self.values[self.by_name.get(n.name, n.name)] for n in placeholders(forward)]
        made = forward(*given)
        names = [x.name if isinstance(x, Node) else "" for x in output_node(forward).args[0]]  # type: ignore[union-attr]
        kept = {name: value for name, value in zip(names, made, strict=True) if name}
        tangents = iter(self.tangents)
        args = []
        for n in placeholders(backward):
            name = self.by_name.get(n.name, n.name)
            found = kept.get(n.name, self.values.get(name))
            args.append(next(tangents) if found is None else found)
        out = backward(*args)
        return list(out)


def measured(subject: Subject, pairs: Sequence[tuple[Split, Split]], rounds: int) -> list[tuple[float, float]]:
    """Least seconds of F and B of torch's and of ours, in turns; the gradients are compared first."""
    found = []
    for theirs, mine in pairs:
        runs = {"torch": Runner(subject, theirs), "ours": Runner(subject, mine)}
        a, b = ([g for g in run() if g is not None] for run in runs.values())
        assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), subject.name
        times = interleaved(runs, rounds)
        found.append((min(times["torch"].wall), min(times["ours"].wall)))
    return found


# --- the tables ---------------------------------------------------------------------------------------------


def curve(subject: Subject, rounds: int) -> tuple[str, list[tuple[Split, Split]]]:
    """The table of one model."""
    named = [(f"torch {budget:.1f}", subject.torchs(budget)) for budget in BUDGETS[::-1]]
    named += [(name, subject.policy(name)) for name in ("selective", "full")]
    pairs = [(theirs, subject.under(theirs.peak)) for _, theirs in named]
    times = measured(subject, pairs, rounds) if rounds else [(1.0, 1.0)] * len(pairs)
    rows = [
        f"| {name} | {a.peak / 1e6:.1f} | {b.peak / 1e6:.1f} | {a.roofline:.2%} / {a.products:.2%} | "
        f"{b.roofline:.2%} / {b.products:.2%} | {mine / other:.2f} |"
        for (name, a), (_, b), (other, mine) in zip(named, pairs, times, strict=True)
    ]
    for a, b in pairs:
        assert b.peak <= a.peak and b.roofline <= a.roofline + 1e-9, (subject.name, a.peak, a.roofline, b.roofline)
    head = "| policy | its peak, MB | ours | recomputed, of F: by roofline / products alone | ours | step, ours : its |"
    nothing = subject.policy("none").peak / 1e6
    text = f"**{subject.name}**: {nothing:.1f} MB where nothing is recomputed\n\n{head}\n|---|---|---|---|---|---|\n"
    return text + "\n".join(rows), pairs


def picture(curves: dict[str, list[tuple[Split, Split]]], nothing: dict[str, int]) -> None:
    """Time over peak, one panel for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "checkpoints"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.4), squeeze=False)
    for panel, (name, pairs) in zip(panels[0], curves.items(), strict=True):
        for label, which, mark in (("torch's partitioner", 0, "x"), ("autopar", 1, "o")):
            points = sorted((pair[which].peak / nothing[name], pair[which].roofline) for pair in pairs[: len(BUDGETS)])
            panel.plot(*zip(*points, strict=True), marker=mark, label=label)
        for label, mark, (policy, _) in zip(("selective", "full"), "s^", pairs[len(BUDGETS) :], strict=True):
            panel.plot(policy.peak / nothing[name], policy.roofline, mark, color="gray", label=label)
        panel.set(title=name, xlabel="peak, of that without recomputation", ylabel="recomputed, of the forward's time")
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to try the harness itself: nothing is written")
    args = parser.parse_args()
    texts, curves, nothing = [], {}, {}
    for name in [args.only] if args.only else MODELS:
        subject = Subject(name, *((2, 64) if args.small else (8, 256)))
        text, curves[name] = curve(subject, args.rounds)
        nothing[name] = subject.policy("none").peak
        print(text, flush=True)
        texts.append(text)
    if not args.small and not args.only:
        picture(curves, nothing)
        publish("checkpoints", "\n\n".join([*texts, "![recompute time over peak](pictures/measured/checkpoints.svg)"]))


if __name__ == "__main__":
    main()
