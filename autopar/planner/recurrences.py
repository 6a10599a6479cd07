"""Recurrences over a sequence that cp shards: which of them run on all tokens of some channels, by estimated time.

`autopar.rules.channel_regions` says what such a region is and where it exchanges. It saves (n - 1)/n of the region's
time. Its all-to-alls, in front and behind, take the place of the gathers that a region on all ranks needs in front.

    conv1d, scan: all tokens gathered, 8 heads on each of 2 ranks   -->   all-to-all, 4 heads each, all-to-all
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch.fx import GraphModule, Node

from autopar.cost.flops import node_seconds
from autopar.cost.hardware import Links, device_of
from autopar.ir.graph import module_path, nbytes, reach, tensor_operands, without_indices
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Stream
from autopar.rules.channel_regions import Region, Seed, Tokens, channel_region, find_seeds, maker_of, share_of
from autopar.rules.sequence_parallel import stream_labels

AXIS = "cp"
BACKWARD = 2  # times the forward
Note = tuple[str, str]


def plan_recurrences(
    gm: GraphModule, mesh: Mesh, options: Options, streams: Sequence[Stream]
) -> tuple[list[Stream], list[Note]]:
    """Streams of channels, and notes on what every rank runs on all tokens. ``streams``: of tokens, on cp."""
    tokens = Tokens(gm, stream_labels(gm, tuple(streams), mesh, AXIS), mesh, AXIS)
    found: list[Stream] = []
    notes: list[Note] = []
    left = {node: None for node in tokens.mixing if tokens.on_tokens(node) is None}  # others have halos
    if tokens.mixing and options.cp_recurrences != "replicate":
        for part, seeds in _parts(tokens, find_seeds(tokens)):
            saved, gathers, exchanges = _seconds(tokens, part, seeds, options)
            times = (
                f"on channels a rank computes {saved * 1e3:.3g} ms less and exchanges for {exchanges * 1e3:.3g} ms, "
                f"replicated it gathers for {gathers * 1e3:.3g} ms"
            )
            left = {node: None for node in left if node not in part.inside}
            if options.cp_recurrences == "auto" and exchanges > saved + gathers:
                notes.append((_place(part.inside), f"replicated on {AXIS}: {times}"))
                continue
            for value, shard in seeds:
                reason = f"{_place(part.inside)}: {times}"
                found.append(Stream(value.name, shard.dim, reason, AXIS, shard.blocks, shard.units, channels=True))
    if left:
        asked = options.cp_recurrences == "replicate"
        why = "asked for" if asked else "none of their dims is computed entry by entry, and as large as the axis"
        notes.append((_place(left), f"replicated on {AXIS}, as it needs tokens of all ranks: {why}"))
    return found, notes


def _parts(tokens: Tokens, seeds: Sequence[Seed]) -> list[tuple[Region, list[Seed]]]:
    """The regions that exchange nothing with each other, with the seeds of each."""
    whole = channel_region(tokens, seeds)
    parts: list[tuple[Region, list[Seed]]] = []
    taken: set[Node] = set()
    for seed in seeds:
        maker = maker_of(seed[0])
        if maker in taken or maker not in whole.inside:
            continue
        inside = {maker_of(n) for n in reach([maker], lambda n: _beside(n, whole))}
        own = [s for s in seeds if maker_of(s[0]) in inside]
        taken |= inside
        at = [e for e in whole.exchanged if not inside.isdisjoint([maker_of(e[0]), *e[0].users])]
        parts.append((Region(inside={n: None for n in tokens.calls if n in inside}, exchanged=at), own))
    return parts


def _beside(node: Node, region: Region) -> list[Node]:
    near = [*node.users, *tensor_operands(node)]
    return [n for n in near if maker_of(n) in region.inside]


def _seconds(tokens: Tokens, part: Region, seeds: Sequence[Seed], options: Options) -> tuple[float, float, float]:
    """(seconds of computation that channels save a rank, of the gathers that they save, of their exchanges) in a step,
    all microbatches."""
    mesh, device = tokens.mesh, device_of(options)
    links, ranks = Links.of(options, mesh), mesh.size(AXIS)
    share = 1 / (mesh.data_size * mesh.size("tp"))  # of a rank, all microbatches together
    mixing = [n for n in part.inside if n in tokens.mixing and tokens.on_tokens(n) is None]
    spared = 1 - max(share_of(tokens, seed) for seed in seeds)
    saved = spared * math.fsum(node_seconds(n, device) for n in mixing) * share * (1 + BACKWARD)
    read = dict.fromkeys(
        x for n in mixing for x in tensor_operands(n) if x in tokens.labels and maker_of(x) not in tokens.mixing
    )
    gathered = [nbytes(x) * (ranks - 1) / ranks * share for x in read]
    sent = [size * share for _, _, size in part.exchanged]
    count = options.microbatches
    exchanges = 2 * links.seconds(AXIS, "all_to_all", math.fsum(sent), count * len(sent))
    ways = "all_gather", "reduce_scatter"
    gathers = math.fsum(links.seconds(AXIS, way, math.fsum(gathered), count * len(gathered)) for way in ways)
    return saved, gathers, exchanges


def _place(nodes: Collection[Node]) -> str:
    """The modules of a region, without the numbers of layers."""
    found = dict.fromkeys(without_indices(module_path(node)) for node in nodes)
    first, *others = sorted(path for path in found if path) or ["the model"]
    return f"{first} and {len(others)} more" if others else first
