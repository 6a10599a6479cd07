"""Gathers and reductions over dp are beside computation, nearly as much as any order of the calls allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.copying.fake import skeleton_of
from autopar.compile.model import compile_model
from autopar.cost.flops import node_seconds, seconds_of
from autopar.cost.graph_times import graph_times, transfer_of
from autopar.cost.hardware import Links, device_of
from autopar.cost.traffic import communication
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.steps.of_rank import backwards
from tests.support.overlap_bounds import least_seconds

aten, ours = torch.ops.aten, torch.ops.autopar


SIZES = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 256, "num_hidden_layers": 3}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("ranks", [2, 8])
def test_nine_tenths_of_what_can_be_hidden_are(ranks: int, zero: int) -> None:
    """In a backward that exchanges for as long as it computes."""
    entry = dataclasses.replace(TINY["llama"], sizes=TINY["llama"].sizes | SIZES)
    mesh, options, batch = Mesh.of(dp=ranks), Options(target_hardware="CPU", zero=zero), entry.batch(4 * ranks, 64)

    def backward(options: Options) -> GraphModule:
        made = compile_model(skeleton_of(entry.build()), batch, mesh, options, outputs=())
        (part,) = backwards(made.stage)
        return part.graph

    graph, device = backward(options), device_of(options)
    rate = sum(moved.bytes for moved in communication(graph, mesh).values()) / seconds_of(graph.graph.nodes, device)
    options = dataclasses.replace(options, topology=f"dp=switch:{rate:.0f}:0")
    graph, links = backward(options), Links.of(options, mesh)
    times, fewest = graph_times(graph, device, links), least_seconds(graph, device, links)
    moving, waiting = (sum(found.values()) for found in (times.moving, times.exposed))
    assert fewest <= times.seconds
    assert moving - waiting >= 0.9 * (moving - (fewest - sum(times.computing.values())))


def call(graph: Graph, target: object, *args: object) -> Node:
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta["val"] = torch.empty(512, 512, device="meta")
    return made


def test_the_bound() -> None:
    """One product beside a gather, one behind it, and a reduction behind that one: the first product costs nothing if
    the gather takes longer."""
    graph = Graph()
    a = graph.placeholder("a")
    a.meta["val"] = torch.empty(512, 512, device="meta")
    gathered = call(graph, ours.all_gather.default, a, 0, [], "dp", 2)
    beside = call(graph, aten.mm.default, a, a)
    behind = call(graph, aten.mm.default, gathered, a)
    reduced = call(graph, ours.all_reduce.default, behind, "dp", "sum")
    graph.output((beside, reduced))
    options = Options(target_hardware="CPU", topology="dp=switch:1e6:0")
    device, links = device_of(options), Links.of(options, Mesh.of(dp=2))
    gather, product, reduction = (
        transfer_of(gathered, device, links)[1], node_seconds(behind, device), transfer_of(reduced, device, links)[1],
    )  # fmt: skip
    found = least_seconds(GraphModule(nn.Module(), graph), device, links)
    assert gather > product and found == pytest.approx(gather + product + reduction)
