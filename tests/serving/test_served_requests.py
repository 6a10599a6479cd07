"""Requests of a real model that come, go and share: chunks, ends, aborts, neighbours, pages; and wrong calls."""

from __future__ import annotations

import gc
import random
import re
import resource
from typing import Any

import pytest
import torch

import autopar
from autopar.serving.sampling_params import Sampling
from autopar.serving.server import Server
from tests.serving.served import GREEDY, LENGTH, NEW, PROMPTS, SIZES, alone, exact, generated, serving, tiny, worst
from tests.support.ranks import refusal, run_ranks

ONE = {"dp": 1}


def of_chunks(kind: str) -> Any:
    model, found = tiny(kind), []
    for tokens, page in ((1, 8), (3, 8), (8, 8), (64, 1), (64, 64)):
        with serving(model, ONE, step_tokens=tokens, page_size=page, max_running=min(tokens, 8)) as server:
            one = generated(server)
        found.append((one.tokens, worst(model, one)))
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_chunks_and_pages_of_any_size(kind: str) -> None:
    (found,) = run_ranks(1, of_chunks, kind)
    assert all(tokens == found[0][0] for tokens, _ in found)
    assert max(apart for _, apart in found) < 1e-12


def ends(kind: str) -> Any:
    """Requests that end at an id of their own, at max_length, or by an abort after k tokens, among others."""
    model = tiny(kind)
    expected = [alone(model, prompt, LENGTH - len(prompt)) for prompt in PROMPTS]
    with serving(model, ONE) as server:
        until = [Sampling(temperature=0.0, eos_token_ids=(tokens[7],)) for tokens in expected]
        some = [until[i] if i % 2 else GREEDY for i in range(len(PROMPTS))]
        mixed = server.complete(PROMPTS, some, want_logits=True)
        longest = server.complete(PROMPTS, Sampling(temperature=0.0, ignore_eos=True))
        for tokens, ticket, full, sampling in zip(expected, mixed, longest, some):
            assert (full.tokens, full.finish_reason) == (tokens, "length")
            count = tokens.index(tokens[7]) + 1 if sampling is not GREEDY else min(NEW, len(tokens))
            assert ticket.tokens == tokens[:count], (ticket.tokens, tokens)
            assert ticket.finish_reason == ("stop" if sampling is not GREEDY else "length")
            rows = exact(model, [*ticket.prompt, *ticket.tokens])[len(ticket.prompt) - 1 : -1]
            assert (torch.stack(ticket.logits) - rows).abs().max() < 1e-12 * rows.abs().max()
        others = [0, 2, 3]
        for stage in (0, 1, 2, 5, 15):  # how many tokens of request 1 there are when it and the long prompt are aborted
            gone = [server.submit(PROMPTS[i], GREEDY) for i in (1, 4)]
            kept = [server.submit(PROMPTS[i], GREEDY, want_logits=True) for i in others]
            if stage:
                stream = iter(gone[0])
                for _ in range(stage):
                    next(stream)
            for ticket in gone:
                ticket.abort()
            for i, ticket in zip(others, kept):
                assert ticket.result(60) == expected[i][:NEW]
                rows = exact(model, [*PROMPTS[i], *ticket.tokens])[len(PROMPTS[i]) - 1 : -1]
                assert (torch.stack(ticket.logits) - rows).abs().max() < 1e-12 * rows.abs().max()
            for i, ticket in zip((1, 4), gone):
                assert ticket.wait(60) and ticket.finish_reason == "abort"
                assert ticket.tokens == expected[i][: len(ticket.tokens)] and len(ticket.tokens) >= (
                    stage if i == 1 else 0
                )
        return server.metrics().pages_used


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_ends_and_aborts_leave_others_alone(kind: str) -> None:
    assert run_ranks(1, ends, kind) == [0]


def bits(kind: str) -> Any:
    """Rows of logits in float32 of one prompt, alone and with others, in steps of one size that hold all prompts."""
    model, found = tiny(kind).float(), []
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    parallel = autopar.parallelize(model, mesh)
    drawn = random.Random(0)
    more = {**SIZES, "step_tokens": 32, "step_sizes": (32,), "split_kv": False}
    with autopar.serve(parallel, **more) as server:
        for count in (0, 1, 3, 7, 7, 7):
            others = [[drawn.randrange(3, 60) for _ in range(drawn.randrange(1, 4))] for _ in range(count)]
            place = drawn.randrange(count + 1)
            prompts = [*others[:place], PROMPTS[3], *others[place:]]
            server.weights_changed()  # so that nothing of it is found in the cache
            found.append(torch.stack(generated(server, prompts).logits[place]))
    return [torch.equal(x, found[0]) for x in found]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_bits_do_not_depend_on_neighbours(kind: str) -> None:
    assert run_ranks(1, bits, kind) == [[True] * 6]


# --- pages ----------------------------------------------------------------------------------------------------


def caches() -> Any:
    """Bytes of the pools per token of rank 0's part, and of windowed kinds the pages in use."""
    found = {}
    for kind in ("llama", "deepseek_v3"):
        with serving(tiny(kind), {"tp": 2}) as server:
            runner: Any = server._leader._runner if server._leader else server._follower._runner  # type: ignore[union-attr]
            held = [pair for stage in runner._stages for pair in zip(stage._inputs, stage._held)]
            pools = [x for name, x in held if name.startswith(("keys_", "values_"))]
            found[kind] = sum(pool.nbytes for pool in pools) / (runner.pages[0] * runner.page_size)
    return found


def test_bytes_per_token() -> None:
    for found in run_ranks(2, caches):
        layers, bytes_of = 2, 8
        assert found["llama"] == layers * 2 * (2 // 2) * 8 * bytes_of  # of 2 key heads one is here
        assert found["deepseek_v3"] < layers * 2 * 4 * 32 * bytes_of


def windows() -> Any:
    """The most pages of each kind in use while one request of gemma3 generates."""
    with serving(tiny("gemma3"), ONE, page_size=2, step_tokens=4, max_running=4) as server:
        used: list[list[int]] = []
        assert server._leader is not None
        cache = server._schedulers[0].cache

        def heard(token: int) -> bool:
            used.append([pool.pages - 1 - pool.free for pool in cache.pools])
            return False

        server.complete([PROMPTS[4]], GREEDY, on_token=[heard])
        return [max(x) for x in zip(*used)], cache.windows


def test_windows_give_pages_back() -> None:
    ((used, kinds),) = run_ranks(1, windows)
    assert kinds[0] == 0 and len(kinds) > 1
    assert used[0] == -(-(LENGTH - 1) // 2)
    for window, pages in zip(kinds[1:], used[1:]):
        assert pages <= (window + 4) // 2 + 2 < used[0]


def shared() -> Any:
    """A prefix of 512 tokens, computed once."""
    model = small()
    prefix = [3 + i * i % 50 for i in range(512)]
    prompts = [[*prefix, 3 + i, 7] for i in range(6)]
    with serving(model, ONE, max_length=600, page_size=64, step_tokens=256) as server:
        found = generated(server, prompts, Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))
        metrics = server.metrics()
    return worst(model, found, prompts), metrics.prompt_tokens, metrics.cached_tokens


def test_a_shared_prefix_is_computed_once() -> None:
    ((apart, prompt_tokens, cached),) = run_ranks(1, shared)
    assert apart < 1e-12
    assert prompt_tokens == 6 * 514 and cached == 5 * 512


def small() -> torch.nn.Module:
    """One layer of width 16."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


def many() -> Any:
    """2,000 random requests with aborts: pages in use and the growth of memory, in MB, of the second half."""
    drawn, model = random.Random(1), small()
    more = {"max_length": 48, "page_size": 4, "step_tokens": 64, "max_running": 32}
    with serving(model, ONE, **more) as server:

        def some(count: int) -> None:
            prompts = [[drawn.randrange(3, 9) for _ in range(drawn.randrange(1, 24))] for _ in range(count)]
            sampling = [Sampling(max_tokens=drawn.randrange(1, 9), seed=drawn.randrange(9)) for _ in range(count)]
            heard = [stopper(server, drawn.randrange(12)) for _ in range(count)]
            server.complete(prompts, sampling, on_token=heard)
            gc.collect()

        some(1000)
        before = peak()
        for _ in range(4):
            some(250)
        metrics = server.metrics()
        assert all(not scheduler._requests and not scheduler._coming for scheduler in server._schedulers)
        return metrics.pages_used, sum(metrics.finished.values()), peak() - before


def stopper(server: Server, after: int) -> Any:
    """Ends a request at its token number ``after``."""
    count = 0

    def heard(token: int) -> bool:
        nonlocal count
        count += 1
        return count > after

    return heard


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_many_requests_leave_nothing_behind() -> None:
    ((used, finished, grown),) = run_ranks(1, many)
    assert used == 0 and finished == 2000
    assert grown < 20


# --- wrong calls ----------------------------------------------------------------------------------------------


def wrong() -> list[str]:
    model = tiny("llama")
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    parallel = autopar.parallelize(model, mesh)

    def serve(**changed: Any) -> Any:
        return autopar.serve(parallel, **{**SIZES, **changed})

    found = [
        refusal(serve, max_length=65),
        refusal(serve, max_length=5),
        refusal(serve, cache=1000),
        refusal(serve, page_size=-1),
        refusal(serve, step_sizes=(4,)),
        refusal(autopar.serve, parallel, mesh, **SIZES, zero=3),
        refusal(autopar.serve, model, **SIZES),
        refusal(autopar.serve, parallel, autopar.init_mesh("cpu", 60.0, tp=1), **SIZES),
        refusal(autopar.serve, tiny("bert"), mesh, **SIZES),
        refusal(autopar.serve, tiny("t5"), mesh, **SIZES),
        refusal(autopar.serve, torch.nn.Linear(2, 2), mesh, **SIZES, example_batch={"input": torch.zeros(1, 2)}),
    ]
    server = serve()
    calls = [[], [64], [-1], [3] * 64]
    found += [refusal(server.submit, prompt) for prompt in calls]
    found += [refusal(server.complete, [[3], prompt]) for prompt in calls[:1]]
    assert server.complete([[3]], GREEDY)[0].tokens == server.submit([3], GREEDY).result(30)
    server.close()
    return [*found, refusal(server.submit, [3]), refusal(server.complete, [[3]])]


def test_wrong_calls() -> None:
    (found,) = run_ranks(1, wrong)
    closed = "serve: the server is closed; make a new one"
    empty = "serve: a prompt needs 1 to 63 tokens, found 0; begin with the token for the start of text"
    long = "serve: a prompt needs 1 to 63 tokens, found 64; shorten it, or raise max_length"
    ids = "serve: a prompt needs token ids from 0 to 63, found {}; use the tokenizer of this model"
    assert found[0] == "serve: max_length 65 is beyond the 64 positions of LlamaForCausalLM; lower it to 64"
    assert found[11:] == [
        empty, ids.format(64), ids.format(-1), long, empty, closed, closed
    ]  # fmt: skip
    for text in found[:11]:
        assert text != "no error" and "\n" not in text and ". " not in text
        assert re.match(r"\w+: .*(needs?|expected|beyond|closed|found|lower) ", text), text
