"""`parallelize(model, mesh="auto", batch=B)`: the layout for the ranks of this world, their chip and their nodes.

Rank 0 chooses, after all ranks have agreed on what they see and were given; all get its choice, or its refusal.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.auto.choice import Asked, choose
from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation
from autopar.auto.finish import Finalist, finalists
from autopar.chips import CHIPS
from autopar.cost.cluster import Cluster, NodeGroup
from autopar.cost.efficiency import DEFAULT_STACK, stack_named
from autopar.options import Options
from autopar.runtime.consistency.rank_checks import RankCheck, agree_on, everywhere, text_of_first
from autopar.runtime.mesh.devices import choose_device
from autopar.runtime.mesh.process_groups import Groups, init_mesh

log = logging.getLogger("autopar.auto")
CPU, LENGTH = "CPU", 2048  # tokens of a row, if nobody says
WIDE = 50e9  # bytes of memory: an A100 with less is the small one


@dataclass(frozen=True)
class Machine:
    """What a rank sees: its chip, bytes of memory of a rank, ranks of its node."""

    chip: str
    memory: int
    per_node: int

    @property
    def cluster(self) -> Cluster:
        """As many such nodes as there are ranks for."""
        chip = CHIPS[self.chip]
        group = NodeGroup(self.chip, 0, self.per_node, chip.inside, chip.links, self.per_node)
        return Cluster(f"{self.per_node} ranks on {self.chip} per node", (group,))


def this_machine(world: int) -> Machine:
    """What this rank sees. Raises ValueError for a GPU that is not in the table of chips."""
    device = choose_device(None)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if device.type != "cuda":
        per_node = per_node or world
        return Machine(CPU, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // per_node, per_node)
    facts = torch.cuda.get_device_properties(device)
    return Machine(
        chip_called(facts.name, facts.total_memory), facts.total_memory,
        per_node or min(world, torch.cuda.device_count()),
    )  # fmt: skip


def chip_called(name: str, memory: float) -> str:
    """The entry of the table for a GPU's name. Raises ValueError."""
    found = [chip for chip in CHIPS if re.search(rf"{chip}(?![0-9])", name.upper())]  # an A1000 is no A100
    if not found:
        raise ValueError(f"auto: needs one of the chips {', '.join(CHIPS)}, found {name!r}; name the mesh")
    longest = max(found, key=len)
    return "A100-40" if longest == "A100" and memory < WIDE else longest


def world_mesh() -> DeviceMesh:
    """All ranks along one axis."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return init_mesh(dp=world)


def layouts_for(
    groups: Groups, model: nn.Module, rows: int, example: Mapping[str, Any], options: Mapping[str, Any], count: int = 1
) -> list[Finalist]:
    """The choice for the ranks of this world, then the fastest others, up to ``count``. Collective. groups: of all
    ranks. model: without weights. rows: of a step of all ranks. example: arguments of the forward, whose sequence
    counts. options: the user's, which stay. The choice is logged, unless others follow.

    Raises ValueError, the same on all ranks, for ranks that see different chips or are given different arguments, and
    for a question without an answer.
    """
    world = groups.mesh.world_size
    machine = this_machine(world)
    seq = sequence_of(example)
    given = {"batch": rows, "seq": seq, "finish": count, "options": sorted(options.items())}
    checks = (
        ({"chip": machine.chip, "ranks per node": machine.per_node}, "auto: all ranks must see the same machine",
         "name the mesh, or start the same ranks everywhere"),
        (given | {"parameters": _shapes(model)}, "auto: every rank must be given the same model, batch and options",
         "call it alike on every rank"),
    )  # fmt: skip
    for facts, need, way_out in checks:
        texts = {name: str(value) for name, value in facts.items()}
        agree_on(groups, [RankCheck(everywhere(groups), texts, need, way_out)], "the choice of a mesh")

    def chosen() -> Explanation:
        stack, cluster = stack_named(DEFAULT_STACK, machine.chip), machine.cluster
        if machine.chip == CPU:
            stack = replace(stack, reserved=0.0)
        fixed = {"memory_limit": machine.memory, **options}
        asked = Asked(world, rows, seq, fixed, finish=max(1, count))
        documents = Options(**asked.carried).documents
        return choose(CostedModel(model, rows_of(example), documents=documents), asked, cluster, stack)

    found, lines = _of_first(groups, chosen, count)
    for line in lines if groups.rank == 0 and count == 1 else ():
        log.info(line)
    return found


def _of_first(groups: Groups, chosen: Callable[[], Explanation], count: int) -> tuple[list[Finalist], list[str]]:
    """(layouts, lines) of rank 0, on all ranks. Raises its ValueError on all."""
    answer: dict[str, Any] = {}
    if groups.rank == 0:
        try:
            found = chosen()
            answer = {"layouts": [vars(one) for one in finalists(found, count)], "lines": found.headline()}
        except ValueError as error:
            answer = {"refused": str(error)}
    answer = json.loads(text_of_first(groups, json.dumps(answer), "the chosen mesh"))
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return [Finalist(**row) for row in answer["layouts"]], answer["lines"]


def _shapes(model: nn.Module) -> str:
    return str([(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()])


# --- batches ---------------------------------------------------------------------------------------------------


def _rows(example: Mapping[str, Any]) -> int:
    sizes = [value.shape[0] for value in example.values() if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise ValueError("auto: needs an example batch with tensors, to know what a row is; pass example_batch={...}")
    return max(sizes, key=sizes.count)


def sequence_of(example: Mapping[str, Any]) -> int:
    """Tokens of a row: the second size of the longest tensor that has one."""
    rows = _rows(example)
    sizes = [value.shape[1] for value in example.values()
             if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == rows]  # fmt: skip
    return max(sizes, default=1)


def lengthened(example: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A guessed example with sequences of the length that its model is planned for, if nobody says another."""
    before, config = sequence_of(example), getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    seq = min([LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    tokens = {
        name: value for name, value in example.items()
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == before and not value.is_floating_point()
    }  # fmt: skip
    return {**example, **{name: value[:, :1].expand(-1, seq) for name, value in tokens.items()}}


def rows_of(example: Mapping[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Makes batches of any number of rows, like an example."""
    rows = _rows(example)

    def made(count: int) -> dict[str, Any]:
        return {
            name: value[:1].expand(count, *value.shape[1:])
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in example.items()
        }  # fmt: skip

    return made
