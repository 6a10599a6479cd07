"""Facts that passes over step graphs make and later ones build on: `check_plain`, `check_gathers_together`."""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import uncast
from autopar.ir.graph import calls_of, describe, is_call, layer_of
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.step_checks import StepError

ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def check_plain(gm: GraphModule, ctx: Compilation) -> None:
    """Nothing takes a value through a detach or an alias: patterns of operators are found behind each other."""
    for node in calls_of(gm.graph, *ALIASES):
        if any(user.op != "output" for user in node.users):
            raise StepError(f"{describe(node)} stands between a value and its users")


def check_gathers_together(gm: GraphModule, ctx: Compilation) -> None:
    """The gathers of the parameters of a layer stand side by side."""
    for group in gathers_by_layer(gm):
        for before, after in itertools.pairwise(group):
            if before.next is not after:
                raise StepError(f"{describe(after)} stands behind {describe(before.next)}, apart from its layer")


def is_parameter_gather(node: Node) -> bool:
    """An all-gather of a placeholder, cast or not, or of a placeholder that another gather made whole."""
    if not is_call(node, torch.ops.autopar.all_gather.default):
        return False
    source = node.args[0]
    return isinstance(source, Node) and (uncast(source).op == "placeholder" or is_parameter_gather(source))


def gathers_by_layer(gm: GraphModule) -> list[list[Node]]:
    """Gathers in order, grouped by the layer that uses them first."""
    groups: list[list[Node]] = []
    last = None
    for node in calls_of(gm.graph, torch.ops.autopar.all_gather.default):
        if is_parameter_gather(node):
            layer = layer_of(node) or layer_of(next(iter(node.users)))
            if not groups or layer != last:
                groups.append([])
                last = layer
            groups[-1].append(node)
    return groups
