"""Attention and experts of served models on real ranks of their own: tokens and logits of one process.

``-m full`` runs the product of models, roles and microbatches.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import distributed_c10d

import autopar
from autopar.report.flight_summary import conclusions, read_flights
from autopar.runtime.comm import pairs
from autopar.runtime.comm.pairs import AnsweringPairs, AskingPairs
from autopar.runtime.fault import flight
from autopar.runtime.module.role_weights import RoleWeights
from autopar.runtime.training.launch import LaunchError
from autopar.serving.expert_server import ExpertServer
from autopar.serving.ping_pong import PingPongRunner, deal
from tests.serving.served import DRAWN, NEW, PROMPTS, SIZES, Sampling, alone, generated, tiny, worst
from tests.support.launched import serve

Sizes = dict[str, int]
LATER = Sampling(temperature=0.0, max_tokens=5, ignore_eos=True)


def launched(body: Any, attention: Sizes, experts: Sizes, *args: Any, timeout: float = 240) -> list[Any]:
    serve()
    world = math.prod(attention.values()) + math.prod(experts.values())
    found: list[Any] = autopar.launch(body, world, (attention, experts, *args), device="cpu", timeout=timeout)
    return found


def serves(attention: Sizes, experts: Sizes, kind: str, microbatches: int, apart: str) -> Any:
    roles = autopar.init_roles("cpu", 60, attention=attention, experts=experts)
    model = tiny(kind)
    more: dict[str, Any] = {"microbatches": microbatches, "apart": apart, "lift_to_float64": True}
    server: Any = autopar.serve(model, roles, **more, **SIZES)
    if roles.role == "experts":
        with pytest.raises(AttributeError, match=r"a rank of experts has no requests, so no submit; .* run\(\) here"):
            server.submit([1])
        server.run()
        held = {name: x.nbytes for name, x in server.held.items()}
        return held, dict(server.traffic), mixed_groups(roles)
    with server:
        found = generated(server)
        drawn = generated(server, sampling=DRAWN)
        one = server.complete(PROMPTS[2:3], LATER)[0].result()  # most ranks, and microbatches, have nothing to do
        apart_by = worst(model, found) if roles.rank == 0 else 0.0
        held = {name: x.nbytes for name, x in server._runner._weights.values().items()}
        return found.tokens, drawn.tokens, one, apart_by, held, dict(server._runner._pairs.traffic), mixed_groups(roles)


def mixed_groups(roles: Any) -> list[str]:
    """Groups of torch with ranks of both roles that are no pairs. Those of the own role count from its first rank."""
    own = range(len(roles.ranks_of(roles.role)))
    return [
        str(members) for members in map(sorted, distributed_c10d._world.pg_group_ranks.values())
        if not set(members) <= set(own) and len(members) != 2
    ]  # fmt: skip


SOME: list[tuple[str, Sizes, Sizes, int, str]] = [
    ("mixtral", {"dp": 2}, {"ep": 2}, 3, "experts"),
    ("deepseek_v3", {"tp": 2}, {"ep": 2}, 2, "experts"),
    ("llama", {"dp": 1}, {"ep": 2}, 2, "mlp"),
]
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
SHAPES: list[tuple[Sizes, Sizes, int]] = [
    ({"dp": 1}, {"ep": 1}, 1), *(({"dp": 2}, {"ep": 2}, m) for m in (1, 2, 3, 4)), ({"dp": 1}, {"ep": 2}, 4),
    ({"dp": 3}, {"ep": 1}, 2), ({"dp": 2}, {"ep": 1}, 2), ({"dp": 1}, {"ep": 4}, 2), ({"tp": 2}, {"ep": 2}, 2),
    ({"tp": 2}, {"ep": 1, "tp": 2}, 3), ({"dp": 2, "tp": 2}, {"ep": 2}, 2),
]  # fmt: skip
ALL = [
    *((kind, *shape, "experts") for kind in MODELS for shape in SHAPES),
    *((kind, {"dp": 2}, {"ep": 2}, 2, "mlp") for kind in ("llama", "gpt2", "qwen3", "gemma3")),
    *((kind, {"tp": 2}, {"ep": 1, "tp": 2}, 2, "mlp") for kind in ("llama", "gpt2")),
]


def check(kind: str, attention: Sizes, experts: Sizes, microbatches: int, apart: str) -> None:
    found = launched(serves, attention, experts, kind, microbatches, apart)
    count = math.prod(attention.values())
    model = tiny(kind)
    tokens, drawn, one, apart_by, *_ = found[0]
    assert apart_by < 1e-12 and tokens[2] == alone(model, PROMPTS[2]) and one == tokens[2][:5]
    assert all(of_rank[:3] == (tokens, drawn, one) for of_rank in found[:count])
    assert not [mixed for *_, mixed in found if mixed]
    held = [rank[4] for rank in found[:count]], [rank[0] for rank in found[count:]]
    _check_held(model, *held, nodes=experts["ep"])


def _check_held(
    model: nn.Module, attention: Sequence[dict[str, int]], experts: Sequence[dict[str, int]], nodes: int
) -> None:
    """Each parameter is held by one role alone; over the ranks of experts it is held once, or within each node whole
    where the plan does not divide it over tp (those of gpt_oss, whose products interleave)."""
    buffers = {name for name, _ in model.named_buffers()}
    for name, x in model.named_parameters():
        asked, answered = [held[name] for held in attention if name in held], [h[name] for h in experts if name in h]
        assert bool(asked) != bool(answered), name
        if answered:
            shared = sum(answered) in (x.nbytes, x.nbytes * len(experts), x.nbytes * len(experts) // nodes)
            assert shared and (x.dim() == 1 or max(answered) <= x.nbytes // nodes), name
    assert all(set(held) - buffers for held in (*attention, *experts))


@pytest.mark.parametrize(("kind", "attention", "experts", "microbatches", "apart"), SOME, ids=str)
def test_equals_one_process(kind: str, attention: Sizes, experts: Sizes, microbatches: int, apart: str) -> None:
    check(kind, attention, experts, microbatches, apart)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "attention", "experts", "microbatches", "apart"), ALL, ids=str)
def test_all_equal_one_process(kind: str, attention: Sizes, experts: Sizes, microbatches: int, apart: str) -> None:
    check(kind, attention, experts, microbatches, apart)


def test_requests_are_dealt_by_their_tokens() -> None:
    assert deal([1, 9, 3, 4, 1], 2) == [[1], [0, 2, 3, 4]] and deal([1, 1, 1], 2) == [[0, 2], [1]]
    assert deal([1], 3) == [[0], [], []] and deal([], 2) == [[], []]


# --- failures ------------------------------------------------------------------------------------------------------


MOMENTS: dict[str, dict[str, tuple[type, str, int]]] = {  # what the rank calls then, and which of its calls
    "a step": {"attention": (PingPongRunner, "run", 6), "experts": (ExpertServer, "_answer", 6)},
    "loading": {"attention": (RoleWeights, "hold", 0), "experts": (RoleWeights, "hold", 0)},
    # each header is followed by a message of rows
    "between header and rows": {"attention": (AskingPairs, "_send", 7), "experts": (AnsweringPairs, "_receive", 9)},
    "ending": {"attention": (AskingPairs, "end", 0)},
}


def break_at(moment: str, role: str, way: str) -> None:
    """From now on this rank dies, stops or raises at a moment."""
    owner, name, which = MOMENTS[moment][role]
    act, calls = getattr(owner, name), iter(range(10**6))

    def broken(*given: Any, **more: Any) -> Any:
        if next(calls) == which:
            if way == "raises":
                raise RuntimeError("the device is gone")
            os.kill(os.getpid(), signal.SIGKILL if way == "dies" else signal.SIGSTOP)
        return act(*given, **more)

    setattr(owner, name, broken)


def breaks(attention: Sizes, experts: Sizes, breaking: int, way: str, moment: str) -> Any:
    """The error of a rank that is left, and the seconds until it came."""
    roles = autopar.init_roles("cpu", 60, attention=attention, experts=experts)
    if roles.rank == breaking:
        break_at(moment, roles.role, way)
    pairs._FIRST = 40 if moment == "between header and rows" else pairs._FIRST
    start = time.monotonic()
    try:
        server: Any = autopar.serve(tiny("mixtral"), roles, microbatches=2, **SIZES)
        start = time.monotonic()
        if roles.role == "experts":
            server.run()
        else:
            server.complete(PROMPTS, Sampling(temperature=0.0, max_tokens=NEW, ignore_eos=True))
            server.close()
    except RuntimeError as error:
        raise RuntimeError(f"{error} [after {time.monotonic() - start:.0f} s]") from error
    return "no error"


SHORT = [(3, "dies", "a step"), (0, "raises", "a step"), (1, "dies", "between header and rows"), (2, "dies", "loading")]
BREAKS = [
    *SHORT,
    *(
        pytest.param(rank, way, moment, marks=pytest.mark.full)
        for moment, roles in MOMENTS.items() for rank in range(4) for way in ("dies", "stops", "raises")
        if (rank, way, moment) not in SHORT and ("experts" if rank > 1 else "attention") in roles
    ),
]  # fmt: skip


@pytest.mark.parametrize(("breaking", "way", "moment"), BREAKS)
def test_all_others_name_the_rank(breaking: int, way: str, moment: str, tmp_path: Path) -> None:
    serve()
    with pytest.raises(LaunchError) as found:
        autopar.launch(breaks_and_notes, 4, (str(tmp_path), breaking, way, moment), device="cpu", timeout=60)
    said = {int(file.name): file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    needed = {2, 3} if moment == "ending" else {*range(4)} - {breaking}  # the other attention rank ends by itself
    assert needed <= said.keys(), found.value
    flights, *_ = read_flights(tmp_path / "flight")
    assert {*said} <= {one.rank for one in flights}
    told = conclusions(flights)
    assert any(text.startswith(f"rank {breaking}") for text in told), told
    for text in said.values():
        seconds = int(text.rpartition("after ")[2].split()[0])
        assert f"rank {breaking}" in text and seconds < 50, text  # 60: torch's own limit
        assert way != "raises" or "the device is gone" in text


def breaks_and_notes(folder: str, breaking: int, way: str, moment: str) -> None:
    rank, os.environ[flight.VARIABLE] = os.environ["RANK"], f"{folder}/flight"
    try:
        breaks({"dp": 2}, {"ep": 2}, breaking, way, moment)
    except RuntimeError as error:
        if int(rank) != breaking:
            (Path(folder) / rank).write_text(str(error))
        raise


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(attention: Sizes, experts: Sizes) -> list[str]:
    """What is refused, on this rank; the roles serve afterwards."""
    roles = autopar.init_roles("cpu", 60, attention=attention, experts=experts)
    moe, dense, found = tiny("mixtral"), tiny("llama"), []
    other = tiny("mixtral")
    with torch.no_grad():
        next(other.parameters())[0, 0] += roles.rank
    cases: list[tuple[Any, dict[str, Any]]] = [
        (dense, {}),
        (moe, {"apart": "mlp"}),
        (moe, {"apart": "layers"}),
        (moe, {"microbatches": 9}),
        (moe, {"microbatches": 1 + roles.rank}),
        (moe, {"microbatches": 0}),
        (moe, {"zero": 3}),
        (moe, {"backend": "inductor"}),
        (other, {}),
        (tiny("mixtral", )if roles.role == "attention" else tiny("qwen3_moe"), {}),
        (tiny("mixtral").to("meta"), {}),
        (tiny("mixtral"), {"max_length": 100_000}),
        (tiny("mixtral"), {"cache": 10}),
    ]  # fmt: skip
    for model, how in cases:
        if roles.rank == len(found) % 3:
            time.sleep(1.5)  # with something else between two calls: the others look for what keeps it
        try:
            autopar.serve(model, roles, **{**SIZES, **how})
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    with autopar.serve(tiny("mixtral"), roles, **SIZES) as server:
        if roles.role == "attention":
            server.complete([[5]], LATER)
    return found


REFUSED = (
    'cut its MLPs by apart="mlp"',
    'apart="mlp" is for dense models',
    "apart: expected",
    "9 microbatches need as many requests",
    "need the same arguments, found microbatches=2 on rank 1",
    "microbatches: expected",
    "found 'zero'",
    "found backend='inductor'",
    "the same weights",
    "the same model",
    "on the meta device; pass weights=folder",
    "max_length 100000",
    "cache",
)


def test_refusals_come_on_all_ranks() -> None:
    found = launched(refused, {"dp": 1}, {"ep": 2})
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(REFUSED)
    for text, word in zip(found[0], REFUSED, strict=True):
        assert word in text, (word, text)


def of_folders(attention: Sizes, experts: Sizes, folders: Sequence[str]) -> list[str]:
    """What is refused of each folder but the last, and one token of a server of that."""
    roles, found = autopar.init_roles("cpu", 60, attention=attention, experts=experts), []
    for folder, cache in zip(folders, (10, None, None, None)):
        with torch.device("meta"):
            model = tiny("mixtral")
        try:
            server = autopar.serve(model, roles, weights=folder, cache=cache, **SIZES)
        except ValueError as error:
            found.append(str(error))
            continue
        with server:
            if roles.role == "attention":
                server.complete([[5]], LATER)
    return found


def test_a_folder_that_does_not_fit_is_refused_on_both_roles(tmp_path: Path) -> None:
    """What one role misses the other does not read. The size of the cache is refused before."""
    folders = [tmp_path / name for name in ("router", "experts", "whole")]
    tiny("mixtral").save_pretrained(folders[2])
    whole = load_file(folders[2] / "model.safetensors")
    router, expert = (next(name for name in whole if part in name) for part in ("moe.gate.", "experts.0.w1."))
    for folder, missing in zip(folders, (router, expert)):
        folder.mkdir()
        some = {name: x for name, x in whole.items() if name != missing}
        save_file(some, folder / "model.safetensors", metadata={"format": "pt"})
    given = [str(folders[i]) for i in (0, 0, 1, 2)]
    first, *others = launched(of_folders, {"dp": 1}, {"ep": 2}, given)
    assert all(found == first for found in others)
    of_cache, of_router, of_experts = first
    assert "cache" in of_cache and "missing" in of_router and "gate.weight" in of_router
    assert "experts.0.w1" not in of_experts and "experts.1.w1" in of_experts and "cannot be computed" in of_experts


def uneven(attention: Sizes, experts: Sizes) -> str:
    roles = autopar.init_roles("cpu", 60, attention=attention, experts=experts)
    try:
        autopar.serve(tiny("mixtral"), roles, **SIZES)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_experts_that_do_not_divide() -> None:
    found = launched(uneven, {"dp": 1}, {"ep": 3})
    assert len(set(found)) == 1 and "3" in found[0], found
