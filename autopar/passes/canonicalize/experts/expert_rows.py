"""What the experts of a loop have in common, computed once on rows sorted by expert.

The values of all experts are followed together: what is equal for all is shared; what differs and depends on no token
is a weight of each, and stacked; what depends on tokens, before any weight, is computed for all of them before the
dispatch; the rest is computed on the rows. A factor of each token that comes last is a weight of the combine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.capture.branches.expert_masks import ANY, distinct_experts
from autopar.ir.graph import values
from autopar.ops import grouped_experts as grouped_experts  # registers the operators
from autopar.ops.traits import is_random
from autopar.passes.canonicalize.experts.expert_loops import Loop, NotGrouped, Numbers, check_alike, mask_behind
from autopar.rewrite.build import Build, calls, shape_of, value_of

aten, ours = torch.ops.aten, torch.ops.autopar
_PRODUCTS = (aten.mm.default, aten.matmul.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.contiguous.default)
_SHAPES = (*_VIEWS, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)
_CONSTANTS = (
    aten.linspace.default, aten.zeros.default, aten.full.default, aten.view.default, aten.reshape.default,
)  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """Equal for all experts."""

    node: Node


@dataclass(frozen=True)
class Each:
    """One per expert, of no token: weights."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Tokens:
    """One row per entry of the mask, before the dispatch; of all experts, or ``nodes``, one per expert."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert. ``weights``: factors of each row that are still to come."""

    node: Node
    weights: tuple[Tokens, ...] = ()


Value = Shared | Each | Tokens | Rows


def grouped(loop: Loop) -> None:
    """Replace a loop. Raises NotGrouped, and leaves the graph as it was, but for dead code."""
    number = Numbers()
    check_alike(loop, number)
    GroupedRows(loop, number).replace()


@dataclass
class GroupedRows:
    """The values of all turns of a loop, followed together."""

    loop: Loop
    number: Numbers
    build: Build = field(init=False)
    known: dict[tuple[Node, ...], Value] = field(default_factory=dict)
    sorted: tuple[int, Node, Node] | None = None  # (number of what was dispatched, its rows, their order)

    def __post_init__(self) -> None:
        self.turns: Sequence[Any] = self.loop.by_expert
        self.last = self.loop.turns[-1]
        self.build = Build(self.last.end)
        mask = self.last.mask
        self.shape, self.index, self.places = self.last.shape, mask.index, mask.places
        self.reduced = ANY in self.places
        self.rows = prod(self.shape)
        self.top = shape_of(self.index)[-1] if len(self.places) > 1 else 1
        dims = [place[0] for place in self.places if isinstance(place, tuple)]
        if sorted(dims) != [d for d, n in enumerate(self.shape) if n > 1 or d in dims] or 0 in self.places:
            raise NotGrouped("its masks are not those of an index of experts")
        if self.reduced and (self.places[-1] != ANY or not distinct_experts(self.index)):
            raise NotGrouped("two of a token's experts may be the same")
        self.choice = self.places[-1][0] if len(self.places) > 1 and not self.reduced else None  # type: ignore[index]
        if self.choice is not None and not distinct_experts(self.index):
            self.choice = None  # such an index may be one of tokens alone, [batch, sequence]

    def replace(self) -> None:
        """Raises NotGrouped."""
        value = self._lifted(tuple(turn.value for turn in self.turns))
        if not isinstance(value, Rows):
            raise NotGrouped("its experts have no weights")
        if self.last.puts and not self._covers():
            raise NotGrouped("some tokens may have no expert")
        combined, of_tokens = self._combined(value)
        first, end = self.loop.turns[0], self.last.end
        combined = self.build.cast(combined, value_of(end).dtype)
        if of_tokens:
            total = self.build.reshape(combined, shape_of(self.last.total))
            total = self.build.cast(total, value_of(self.last.total).dtype)
            self.last.total.replace_all_uses_with(total, propagate_meta=False)
        else:
            total = self.build.reshape(combined, shape_of(end))
            end.replace_all_uses_with(total, propagate_meta=False)
        if not self.last.puts:
            self.last.sum.replace_input_with(self.last.base, first.base)
        _drop_copies(total if self.last.puts else self.last.sum)

    # --- following all experts --------------------------------------------------------------------------------

    def _lifted(self, nodes: tuple[Node, ...]) -> Value:
        if nodes not in self.known:
            self.known[nodes] = self._found(nodes)
        return self.known[nodes]

    def _found(self, nodes: tuple[Node, ...]) -> Value:
        first = nodes[0]
        if all(map(self._is_input, nodes, self.turns)):
            inner: tuple[Any, ...] = tuple(x.args[1] for x in nodes)
            same = len({self.number(x) for x in inner}) == 1
            return Tokens((inner[0],) if same else inner)
        if len({self.number(x) for x in nodes}) == 1:
            return Shared(first)
        if any(x.op != "call_function" or x.target != first.target for x in nodes):
            return self._weights(nodes)
        places = [_operands(x) for x in nodes]
        if len({len(found) for found, _ in places}) > 1:
            return self._weights(nodes)
        operands = [self._lifted(given) for given in zip(*(found for found, _ in places), strict=True)]
        if len({tuple(rest) for _, rest in places}) > 1:  # w[:, e]
            of_tokens = operands and all(isinstance(x, Tokens | Shared) for x in operands)
            alike = len({shape_of(x) for x in nodes if isinstance(x.meta["val"], torch.Tensor)}) == 1
            if of_tokens and alike and any(isinstance(x, Tokens) for x in operands):
                return self._for_each(nodes, operands)
            return self._weights(nodes)
        if not any(isinstance(x, Tokens | Rows) for x in operands):
            return self._weights(nodes)
        if is_random(first.target):
            raise NotGrouped(f"{first.target} draws random numbers for its tokens")
        if all(isinstance(x, Shared) or (isinstance(x, Tokens) and len(x.nodes) == 1) for x in operands):
            return Tokens((self._again(first, [_node(x) for x in operands]),))
        if all(isinstance(x, Shared | Tokens) for x in operands):
            return self._for_each(nodes, operands)
        return self._on_rows(first, operands)

    def _weights(self, nodes: tuple[Node, ...]) -> Value:
        """Raises NotGrouped where one depends on the rows of an expert."""
        shapes = {tuple((v.shape, v.dtype) for v in values(x)) for x in nodes}
        if len(shapes) > 1 or any(self._depends(x, turn) for x, turn in zip(nodes, self.turns, strict=True)):
            raise NotGrouped(f"its experts differ at {', '.join(dict.fromkeys(x.name for x in nodes[:2]))}")
        return Each(nodes)

    def _depends(self, node: Node, turn: Any) -> bool:
        pending, seen = [node], set()
        while pending:
            x = pending.pop()
            if self._is_input(x, turn):
                return True
            pending += [y for y in x.all_input_nodes if y not in seen]
            seen.update(x.all_input_nodes)
        return False

    def _is_input(self, node: Node, turn: Any) -> bool:
        """where(mask of the expert, tokens, constant)"""
        if not calls(node, aten.where.self) or node is turn.end:
            return False
        constant: Any = node.args[2]
        while isinstance(constant, Node) and constant.target in _CONSTANTS and constant.all_input_nodes:
            constant = constant.all_input_nodes[0]
        if not calls(constant, *_CONSTANTS):
            return False
        found = mask_behind(node.args[0])
        return (
            found is not None
            and found[0].expert == turn.mask.expert
            and (self.number(found[0].index) == self.number(turn.mask.index) and found[0].kept == turn.mask.kept)
        )

    def _again(self, node: Node, operands: Sequence[Any]) -> Node:
        given = dict(zip(_operands(node)[0], operands, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        target: Any = node.target
        return self.build(target, *args, **kwargs)

    def _for_each(self, nodes: tuple[Node, ...], operands: list[Value]) -> Value:
        made = []
        for i, node in enumerate(nodes):
            given = [x.nodes[min(i, len(x.nodes) - 1)] if isinstance(x, Tokens) else _node(x) for x in operands]
            made.append(self._again(node, given))
        return Tokens(tuple(made))

    # --- on rows ----------------------------------------------------------------------------------------------

    def _on_rows(self, node: Node, operands: list[Value]) -> Value:
        if calls(node, aten.mul.Tensor) and len(operands) == 2:
            weighted = self._weighted(node, operands)
            if weighted is not None:
                return weighted
        weights = tuple(w for x in operands if isinstance(x, Rows) for w in x.weights)
        if weights and not (node.target in (*_CASTS, *_SHAPES) and shape_of(node) == shape_of(_operands(node)[0][0])):
            raise NotGrouped(f"a token's weight is not the last factor, but before {node.name}")
        given: list[Value] = [self._dispatched(x) if isinstance(x, Tokens) else x for x in operands]
        if any(isinstance(x, Each) for x in given):
            return Rows(self._product(node, given), weights)
        if node.target in _VIEWS:
            return Rows(self._viewed(node, _node(given[0])), weights)
        return Rows(self._again(node, [_node(x) for x in given]), weights)

    def _weighted(self, node: Node, operands: list[Value]) -> Rows | None:
        """mul(rows, weight of each token)"""
        for x, w in (operands, operands[::-1]):
            if isinstance(x, Rows) and isinstance(w, Tokens):
                shape = shape_of(w.nodes[0])
                if len(shape) != 2 or shape[1] != 1:
                    raise NotGrouped(f"{node.name} multiplies rows by values of tokens of shape {list(shape)}")
                return Rows(x.node, (*x.weights, w))
        return None

    def _viewed(self, node: Node, x: Node) -> Node:
        sizes = list(shape_of(node))
        if sizes[:1] != [self.rows]:
            raise NotGrouped(f"{node.name} views several rows as one")
        target = aten.expand.default if calls(node, aten.expand.default) else aten.reshape.default
        return self.build(target, x, [shape_of(x)[0], *sizes[1:]])

    def _product(self, node: Node, given: list[Value]) -> Node:
        """An operator with a weight of each expert."""
        kinds = [type(x) for x in given]
        if calls(node, aten.linear.default) and kinds[:2] == [Rows, Each] and kinds[2:] in ([], [Each]):
            made = self._grouped(_node(given[0]), given[1], False)
            return self._biased(made, given[2]) if len(given) > 2 else made
        if calls(node, *_PRODUCTS) and kinds == [Rows, Each]:
            return self._grouped(_node(given[0]), given[1], True)
        if calls(node, aten.addmm.default) and kinds == [Each, Rows, Each] and not node.kwargs:
            return self._biased(self._grouped(_node(given[1]), given[2], True), given[0])
        vector = {Rows, Each} == {*kinds} and len(kinds) == 2 and not node.kwargs and len(node.args) == 2
        if vector and calls(node, aten.add.Tensor, aten.mul.Tensor):
            rows, each = sorted(given, key=lambda x: isinstance(x, Each))
            if calls(node, aten.add.Tensor):
                return self._biased(_node(rows), each)
            zeros = self.build(aten.zeros_like.default, _node(rows))
            return self.build(aten.mul.Tensor, _node(rows), self._biased(zeros, each))
        raise NotGrouped(f"{node.target} with a weight of each expert has no grouped form")

    def _grouped(self, rows: Node, each: Any, transposed: bool) -> Node:
        if len(shape_of(rows)) != 2 or len(shape_of(each.nodes[0])) != 2:
            raise NotGrouped("a product of its experts is not one of two matrices")
        assert self.sorted is not None
        weight, turned = self._stacked(each.nodes)
        return self.build(ours.grouped_mm.default, rows, weight, self.offsets, transposed != turned)

    def _biased(self, rows: Node, each: Any) -> Node:
        if len(shape_of(each.nodes[0])) != 1 or len(shape_of(rows)) != 2 or shape_of(each.nodes[0])[0] == 1:
            raise NotGrouped("a bias of its experts is not a vector")
        weight, _ = self._stacked(each.nodes)
        return self.build(ours.grouped_bias.default, rows, weight, self.offsets)

    def _stacked(self, nodes: tuple[Node, ...]) -> tuple[Node, bool]:
        """(weights of all experts, whether they are transposed): of a parameter with one entry for each, itself."""
        inner, turned = list(nodes), False
        while all(calls(x, aten.t.default, aten.transpose.int, aten.permute.default) for x in inner):
            if len(shape_of(inner[0])) != 2 or (calls(inner[0], aten.permute.default) and inner[0].args[1] != [1, 0]):
                break
            inner, turned = [x.args[0] for x in inner], not turned  # type: ignore[misc]
        stored = (place_of(inner[0]) or inner)[0]
        entries = [(stored, 0, i, 1) for i in range(len(inner))]
        if shape_of(stored) == (len(inner), *shape_of(inner[0])) and [place_of(x) for x in inner] == entries:
            return stored, turned
        return self.build(aten.stack.default, inner), turned

    # --- dispatch and combine -----------------------------------------------------------------------------------

    @property
    def experts(self) -> int:
        return len(self.turns)

    def _dispatched(self, value: Tokens) -> Rows:
        """Tokens, sorted by expert: one value of all experts, [n, H]."""
        if len(value.nodes) > 1:
            raise NotGrouped("what its experts compute with differs between them")
        x = value.nodes[0]
        if len(shape_of(x)) != 2 or not value_of(x).is_floating_point():
            raise NotGrouped(f"its experts compute with values of tokens of shape {list(shape_of(x))}")
        if self.sorted is None:
            self.tokens = x if self.reduced or self.top == 1 else self._before_repeating(x)
            if self.last.puts or self._kept_apart():
                self.tokens = None if not self.reduced and self.top > 1 else self.tokens
            self.expert = self._experts_of_tokens() if self.tokens is not None else self._experts_of_pairs()
            made = self.build(
                ours.moe_dispatch.default, self.tokens if self.tokens is not None else x, self.expert, self.experts
            )
            rows, order, self.offsets = (self.build(operator.getitem, made, i) for i in range(3))
            self.sorted = self.number(x), rows, order
        if self.number(x) != self.sorted[0]:
            raise NotGrouped("its experts compute with several values of the tokens")
        return Rows(self.sorted[1])

    def _kept_apart(self) -> bool:
        """Whether what is added is not summed over the choices of a token."""
        return prod(shape_of(self.last.total)[:-1]) == self.rows and self.top > 1 and not self.reduced

    def _before_repeating(self, x: Node) -> Node | None:
        """[T, H] of tokens that are repeated for each of their experts; None if they are not."""
        while calls(x, *_VIEWS, aten.clone.default) and not calls(x, aten.expand.default):
            x = x.args[0]  # type: ignore[assignment]
        if not calls(x, aten.expand.default) or self.choice is None:
            return None
        before: Any = x.args[0]
        if shape_of(x)[:-1] != self.shape or shape_of(before)[int(self.choice)] != 1 or not self._in_order():
            return None
        if prod(shape_of(before)[:-1]) * self.top != self.rows:
            return None
        return self.build.reshape(before, (self.rows // self.top, shape_of(x)[-1]))

    def _in_order(self) -> bool:
        """Whether tokens come in the same order in the mask as in the index."""
        dims = [place[0] for place in self.places[:-1]]  # type: ignore[index]
        return dims == sorted(dims)

    def _experts_of_tokens(self) -> Node:
        """[T, K]"""
        tokens = prod(shape_of(self.index)) // self.top
        expert = self.build.reshape(self.index, (tokens, self.top))
        if self.last.mask.kept and (self.reduced or not self._kept_like_rows()):
            raise NotGrouped("a condition besides the choice of an expert has another shape")
        return self._valid(expert, self._of_tokens)

    def _experts_of_pairs(self) -> Node:
        """[n, 1], in the order of the mask"""
        if self.reduced:
            raise NotGrouped("its tokens are not rows of one value")
        order = sorted(range(len(self.places)), key=lambda i: self.places[i])
        index = self.index if order == list(range(len(order))) else self.build(aten.permute.default, self.index, order)
        if self.last.mask.kept and not self._kept_like_rows():
            raise NotGrouped("a condition besides the choice of an expert has another shape")
        return self._valid(self.build.reshape(index, (self.rows, 1)), lambda x: self.build.reshape(x, (self.rows, 1)))

    def _kept_like_rows(self) -> bool:
        """Whether conditions have the shape of the mask."""
        whole = tuple((d,) for d in range(len(self.shape)))
        return all(at == whole and shape_of(x) == self.shape for x, at in self.last.mask.kept)

    def _valid(self, expert: Node, arranged: Callable[[Node], Node]) -> Node:
        """The experts, with a number that none has where a token is dropped."""
        nobody = None
        for kept, _ in self.last.mask.kept:
            nobody = nobody or self.build(aten.full.default, [], self.experts, dtype=value_of(expert).dtype)
            mask = arranged(kept)
            mask = mask if value_of(mask).dtype == torch.bool else self.build(aten.ne.Scalar, mask, 0)
            expert = self.build(aten.where.self, mask, expert, nobody)
        if not (distinct_experts(self.index) and self.top > 1):
            nobody = nobody or self.build(aten.full.default, [], self.experts, dtype=value_of(expert).dtype)
            expert = self.build(aten.where.self, self.build(aten.lt.Scalar, expert, 0), nobody, expert)
        return expert

    def _of_tokens(self, x: Node) -> Node:
        """[n, ...] in the order of the mask -> [T, K] in that of the index"""
        x = self.build.reshape(x, self.shape)
        if self.choice is not None and self.choice != len(self.shape) - 1:
            order = [d for d in range(len(self.shape)) if d != self.choice]
            x = self.build(aten.permute.default, x, [*order, self.choice])
        return self.build.reshape(x, (self.rows // self.top, self.top) if not self.reduced else (self.rows, 1))

    def _combined(self, value: Rows) -> tuple[Node, bool]:
        """(what the experts add, whether that is one row per token)"""
        assert self.sorted is not None
        of_tokens = self.tokens is not None
        shape = shape_of(self.expert)
        weights = None
        for w in value.weights:
            made = self._weight(w, of_tokens)
            weights = made if weights is None else self.build(aten.mul.Tensor, weights, made)
        if weights is None:
            like = self.build(aten.new_ones.default, self.sorted[1], list(shape))
            weights = like
        if shape_of(weights) != shape:
            weights = self.build(aten.expand.default, weights, list(shape))
        return self.build(ours.moe_combine.default, value.node, self.sorted[2], weights), of_tokens

    def _weight(self, value: Tokens, of_tokens: bool) -> Node:
        """A factor [n, 1] -> [T, K], or [n, 1] for pairs"""
        if len(value.nodes) == 1:
            w = value.nodes[0]
            return self._of_tokens(w) if of_tokens else self.build.reshape(w, (self.rows, 1))
        whole = self.build(aten.cat.default, list(value.nodes), 1)  # [n, E]
        expert = self.expert if shape_of(self.expert)[0] == self.rows else None
        if expert is None:
            raise NotGrouped("a weight differs between experts and choices")
        if self.last.mask.kept or not distinct_experts(self.index):
            expert = self.build(aten.clamp.default, expert, 0, self.experts - 1)
        return self.build(aten.gather.default, whole, 1, expert)

    def _covers(self) -> bool:
        """Whether each token has an expert: its index is of a topk over as many numbers."""
        x = self.index
        while calls(x, *_VIEWS, *_CASTS):
            x = x.args[0]  # type: ignore[assignment]
        of = x.args[0] if calls(x, operator.getitem) else None
        if not calls(of, aten.topk.default, aten.max.dim, aten.sort.default) or self.last.mask.kept:
            return False
        return shape_of(of.args[0])[-1] == self.experts  # type: ignore[union-attr, arg-type]


def _drop_copies(x: Node) -> None:
    """copy(y, x) --> x, so that what y was before is not computed."""
    for user in list(x.users):
        same = calls(user, aten.copy.default) and user.args[1] is x
        if same and (shape_of(user), value_of(user).dtype) == (shape_of(x), value_of(x).dtype):
            user.replace_all_uses_with(x, propagate_meta=False)


def _node(x: Value) -> Node:
    assert not isinstance(x, Each)
    return x.nodes[0] if isinstance(x, Tokens) else x.node


def _operands(node: Node) -> tuple[list[Node], list[Any]]:
    """(operands, everything else) of a call, in order."""
    found: list[Node] = []
    rest: list[Any] = []

    def walk(x: Any) -> None:
        if isinstance(x, Node):
            found.append(x)
            rest.append("operand")
        elif isinstance(x, tuple | list):
            rest.append(("list", len(x)))
            for y in x:
                walk(y)
        else:
            rest.append((type(x), repr(x)))

    walk(node.args)
    rest.append(tuple(node.kwargs))
    walk(tuple(node.kwargs.values()))
    return found, rest


def place_of(node: Node) -> tuple[Node, int, int, int] | None:
    """(value, dim, first entry, entries) of a part of it; with one entry, the part may have lost the dim."""
    source: Any = node.args[0] if node.args else None
    if calls(node, operator.getitem) and calls(source, *_SPLITS):
        of, index, made = source.args[0], int(node.args[1]), source.meta["val"]  # type: ignore[arg-type]
        alone = source.target is aten.unbind.int
        dim = int(source.args[1 if alone else 2] if len(source.args) > (1 if alone else 2) else 0) % len(shape_of(of))
        return (
            (of, dim, index, 1) if alone else (of, dim, sum(x.shape[dim] for x in made[:index]), made[index].shape[dim])
        )
    if not calls(node, aten.select.int, aten.slice.Tensor) or any(isinstance(x, Node) for x in node.args[1:]):
        return None
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(shape_of(source))  # type: ignore[arg-type]
    first, size = int((node.args[2] if len(node.args) > 2 else 0) or 0), shape_of(source)[dim]  # type: ignore[arg-type]
    first = max(first + size, 0) if first < 0 else min(first, size)
    if calls(node, aten.select.int):
        return source, dim, first, 1
    return (source, dim, first, shape_of(node)[dim]) if node.args[4:] in ((), (1,)) else None
