"""Prices by closed formulas, in place of compiled layers: a search over them takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.auto.space import POLICIES
from autopar.cost.layout import Layout
from autopar.cost.layout_price import Cause, Price
from autopar.cost.parts import layers_of_parts, ranks_of_part


@dataclass
class StandIn:
    """A transformer by formulas: ``layers`` of ``width``, and a head as large as ``head`` of them, on chips with
    ``flops``, ``links`` and ``limit``."""

    layers: int = 8
    width: int = 4096
    head: float = 0.0
    seq: int = 4096
    flops: float = 400e12
    inside: float = 300e9
    cards: float = 25e9
    limit: float = 80e9
    per_node: int = 8
    refused: str = ""
    asked: set[Layout] = field(default_factory=set)

    def price(self, layout: Layout, simulated: bool = False) -> Price:
        """By causes as those of real prices."""
        self.asked.add(layout)
        if layout.ep > 1:
            return Price.of_refusal("experts: nothing to shard on axis 'ep'")
        p, m, v, rows = layout.pp, layout.microbatches, layout.virtual_stages, layout.micro_batch
        tokens = rows * self.seq / layout.cp
        held = self._held(layout)
        per_rank = max(held)
        products = 6 * 12 * self.width**2 * tokens * per_rank / layout.tp / self.flops
        again = (0.0, 0.05, 0.33)[POLICIES.index(layout.activation_checkpoint)] * products
        hidden = tokens * self.width * 2
        tp = (
            8 * hidden * (layout.tp - 1) / layout.tp / self.inside * per_rank * (1 if layout.sequence_parallel else 1.1)
        )
        cp = 3 * hidden * (layout.cp - 1) / self.inside * per_rank
        each = products + again + tp + cp
        bubble = {"1f1b": each, "": 0.0, "interleaved": each / v, "zb_h1": each / 3, "zb_v": each / 9}[layout.schedule]
        elements = 12 * self.width**2 * per_rank / layout.tp
        shards = layout.dp * layout.cp
        speed = self.inside if layout.dp * layout.tp * layout.cp <= self.per_node else self.cards
        times = 1 if layout.zero < 2 or layout.reduce_grads == "step" else m
        data = 2 * elements * 2 * (times if layout.zero == 3 else 1) / speed * (shards > 1 or layout.dp_replicate > 1)
        optimizer = 30 * elements / (shards if layout.zero else 1) / 2e12 * (5 if layout.optimizer_cpu_offload else 1)
        causes = [
            Cause("products", "", m * products, m * products),
            Cause("recomputation", "", m * again, m * again),
            Cause("tp", "tp", m * tp, m * tp),
            Cause("cp", "cp", m * cp, m * cp),
            Cause("bubble", "pp", (p - 1) * bubble, (p - 1) * bubble),
            Cause("pp", "pp", m * v * hidden / self.cards * (p > 1), m * v * hidden / self.cards * (p > 1)),
            Cause("dp", "dp", data, data),
            Cause("optimizer", "", optimizer, optimizer),
        ]
        seconds = sum(c.exposed for c in causes)
        memory = tuple(self._memory(layout, rank, hidden, held[rank]) for rank in range(p))
        return Price(seconds, 0.4, 1.0, tuple(c for c in causes if c.seconds), memory, self.limit)

    def _held(self, layout: Layout) -> list[float]:
        """Layers of each rank of pp, with the head."""
        held = [0.0] * layout.pp
        for part, layers in enumerate(layers_of_parts(layout, range(self.layers))):
            for rank in ranks_of_part(part, layout):
                held[rank] += len(layers) + self.head * (part == layout.parts - 1)
        return held

    def _memory(self, layout: Layout, rank: int, hidden: float, held: float) -> float:
        elements = 12 * self.width**2 * held / layout.tp
        shards = layout.dp * layout.cp
        weights = 2 * elements / (shards if layout.zero == 3 else 1)
        gradients = 2 * elements / (shards if layout.zero >= 2 and layout.reduce_grads != "step" else 1)
        states = 0 if layout.optimizer_cpu_offload else 12 * elements / (shards if layout.zero else 1)
        kept = (34, 20, 2)[POLICIES.index(layout.activation_checkpoint)]
        saved = kept / 2 * hidden / layout.tp * held * min(layout.microbatches, layout.pp - rank)
        logits = self._of_loss(layout) / layout.loss_chunks * (rank in ranks_of_part(layout.parts - 1, layout))
        return weights + gradients + states + saved + logits

    def _of_loss(self, layout: Layout) -> float:
        """Bytes of the logits."""
        return 14 * 32000 * layout.micro_batch * self.seq / layout.cp / layout.tp

    def bound(self, layout: Layout) -> None:
        """Nothing is compiled."""

    def is_close(self, layout: Layout) -> bool:
        """There is no bound."""
        return False

    def memory(self, layout: Layout) -> Price:
        """The price."""
        return self.price(layout)

    def weights(self, layout: Layout) -> float:
        """Bytes of parameters, gradients and optimizer states."""
        elements = 12 * self.width**2 * self.layers / layout.pp / layout.tp
        shards = layout.dp * layout.cp
        states = 0 if layout.optimizer_cpu_offload else 12 / (shards if layout.zero else 1)
        gathered = 2 / (shards if layout.zero == 3 else 1)
        summed = 2 / (shards if layout.zero >= 2 and layout.reduce_grads != "step" else 1)
        return float(elements * (gathered + summed + states))
