"""What serving costs on one process: `autopar.serve` beside transformers' `generate` and its continuous batching.

    python tests/benchmarks/bench_serving.py [--rounds 5]

Seconds are of the processor, all threads together, one thread per operator. All rows alternate within one process, each
round with new prompts, so that no prefix is found again. The tokens of all rows are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import load, publish, table
from meter import Meter
from serving_peers import Generate, continuous, ours, static_batches
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cli.serving_plan import parameter_plan
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.serve_model import generation_facts, packed_model
from autopar.serving.server import Server
from autopar.serving.step import Row, RowChoice, Step

PROMPT = NEW = 64  # tokens
LENGTH, PAGE = 256, 64  # most tokens of a request, tokens of a page
ROWS = 8  # of a static batch, and that run at a time
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 24, 1387, 765
STEPS = 100


@dataclass(frozen=True)
class Model:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int = 8

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=8192,
            eos_token_id=None, pad_token_id=0, bos_token_id=1,
        )  # fmt: skip

    def make(self) -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(self.config()).eval()


LARGE, SMALL = Model(512, 1408, 8, 8, 32_000), Model(32, 128, 4, 2, 64)
LLAMA_8B = Model(4096, 14336, 32, 8, 128_256, layers=32)


def main() -> None:
    """Time all, print the tables, write them to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="another number leaves the page alone")
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before, mesh = load(), autopar.init_mesh("cpu")
    model = LARGE.make()
    server = autopar.serve(model, mesh, max_length=LENGTH, page_size=PAGE, max_running=ROWS)
    texts = [_generation(model, server, rounds), _workload(model, server, rounds), _memory(model, server)]
    server.close()
    small = SMALL.make()
    server = autopar.serve(small, mesh, max_length=LENGTH, page_size=PAGE, max_running=ROWS)
    texts += [_small_step(small, server), _compile()]
    server.close()
    text = "\n\n".join([f"{rounds} rounds; {before} before, {load().split(' on ')[0]} after.", *texts])
    publish("serving", text) if rounds == parser.get_default("rounds") else print(text)


# --- generation ----------------------------------------------------------------------------------------------


def _generation(model: Any, server: Server, rounds: int) -> str:
    rows = []
    for count in (1, ROWS):
        peers: dict[str, Generate] = {
            "autopar": ours(server),
            "generate, dynamic cache": static_batches(model, count),
            "generate, static cache": static_batches(model, count, cache_implementation="static", disable_compile=True),
            "continuous batching": continuous(model, count, blocks=4 * ROWS),
        }
        lengths = [(PROMPT, NEW)] * count
        rows += [[str(count), *row] for row in _rows(peers, lengths, rounds, LARGE.vocab)]
    head = ["requests", "", "new tokens/s, best", "median", "autopar is faster by: best", "median", "equal tokens"]
    return f"Prompts of {PROMPT} tokens, {NEW} new ones each.\n\n{table(head, rows)}"


def _workload(model: Any, server: Server, rounds: int) -> str:
    lengths = _uneven()
    peers: dict[str, Generate] = {
        "autopar": ours(server),
        "static batches, dynamic cache": static_batches(model, ROWS),
        "continuous batching": continuous(model, ROWS, blocks=4 * ROWS),
    }
    rows = _rows(peers, lengths, rounds, LARGE.vocab)
    head = ["", "new tokens/s, best", "median", "autopar is faster by: best", "median", "equal tokens"]
    return (
        f"{REQUESTS} requests of uneven lengths, {PROMPT_TOKENS:,} tokens of prompts and {NEW_TOKENS} new ones in all, "
        f"{ROWS} at a time.\n\n{table(head, rows)}"
    )


def _uneven() -> list[tuple[int, int]]:
    """(tokens of the prompt, new tokens) of each request, the same each time."""
    seeded = random.Random(0)

    def parts(total: int, least: int) -> list[int]:
        weights = [seeded.random() ** 2 + 0.02 for _ in range(REQUESTS)]
        found = [least + int((total - least * REQUESTS) * w / sum(weights)) for w in weights]
        found[0] += total - sum(found)
        return found

    return list(zip(parts(PROMPT_TOKENS, 8), parts(NEW_TOKENS, 4), strict=True))


def _rows(
    peers: Mapping[str, Generate], lengths: Sequence[tuple[int, int]], rounds: int, vocab: int
) -> list[list[str]]:
    """The first of the peers is ours."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    equal: dict[str, int] = dict.fromkeys(peers, 0)
    for i in range(1 + rounds):
        prompts = [torch.randint(3, vocab, (n,)).tolist() for n, _ in lengths]
        found = {name: run(prompts, [new for _, new in lengths]) for name, run in peers.items()}
        reference = next(iter(found.values()))[1]
        for name, (took, tokens) in found.items():
            if i:
                seconds[name].append(took)
                equal[name] += sum(a == b for x, y in zip(reference, tokens) for a, b in zip(x, y))
    new, first = sum(n for _, n in lengths), next(iter(seconds.values()))
    rows = []
    for name, took in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(took, first, strict=True))
        speeds = [f"{new / pick(took):.1f}" for pick in (min, statistics.median)]
        label = f"**{name}**" if took is first else name
        rows.append(
            [label, *speeds, f"{min(took) / min(first):.2f}", f"{ratio:.2f}", f"{equal[name] / new / rounds:.1%}"]
        )
    return rows


# --- a step --------------------------------------------------------------------------------------------------


def _decode(server: Server, count: int) -> Callable[[], Any]:
    """A step in which ``count`` requests of 70 tokens get one more, without the scheduler."""
    runner, held = server._leader._runner, -(-LENGTH // PAGE)
    rows = tuple(
        Row(r, (5,), 70, (tuple(range(1 + held * r, 1 + held * (r + 1))),),
            RowChoice(autopar.Sampling(temperature=0.0), 71, 0, PROMPT))
        for r in range(count)
    )  # fmt: skip
    return lambda: runner.run(Step((rows,)))


def _forward(model: Any, count: int) -> tuple[Callable[[], Any], Any]:
    """The same step of transformers' forward with a dynamic cache, which grows by a token each time; and the cache."""
    with torch.no_grad():
        ids = torch.randint(3, 60, (count, 70))
        cache = model(ids, use_cache=True).past_key_values

    def step() -> Any:
        with torch.no_grad():
            return model(ids[:, :1], past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()

    return step, cache


def _small_step(model: Any, server: Server) -> str:
    rows = []
    for count in (1, ROWS):
        steps = {"**autopar**": _decode(server, count), "forward, dynamic cache": _forward(model, count)[0]}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for i in range(STEPS + 10):
            for name, step in steps.items():
                start = time.process_time()
                step()
                if i >= 10:
                    times[name].append(time.process_time() - start)
        first = next(iter(times.values()))
        for name, took in times.items():
            picked = [(pick(took), pick(first)) for pick in (min, statistics.median)]
            rows.append([count, name, *(f"{a * 1e3:.2f}" for a, _ in picked), *(f"{a / b:.2f}" for a, b in picked)])
    head = ["requests", "", "ms of a step, best", "median", "autopar is faster by: best", "median"]
    what = f"One token of each request, page tables to chosen tokens: {SMALL.layers} layers of width {SMALL.hidden}."
    return f"{what}\n\n{table(head, rows)}"


def _memory(model: Any, server: Server) -> str:
    mine, (theirs, cache) = _decode(server, ROWS), _forward(model, ROWS)
    peaks = []
    for step in (mine, theirs):
        with Meter() as meter:
            step()
        peaks.append(meter.peak)
    runner = server._leader._runner
    per_token = sum(layer.bytes_per_token for layer in runner.packed.layers)
    weights = sum(x.nbytes for x in model.parameters())
    pools = sum(x.nbytes for stage in runner._stages for x in stage.pools.values())
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    pages = -(-(PROMPT + NEW) // PAGE) * PAGE
    rows = []
    for name, of_token, tokens, peak in (
        ("**autopar**", per_token, pages, peaks[0] - pools),
        ("dynamic cache", held // (ROWS * cache.get_seq_length()), PROMPT + NEW, peaks[1] - held),
    ):
        rows.append([name, of_token, f"{ROWS * tokens * of_token / 1e6:.1f}", f"{(peak - weights) / 1e6:.2f}"])
    head = ["", "bytes of a token", f"MB of {ROWS} requests of {PROMPT + NEW} tokens", "peak MB of a step that decodes"]
    return f"{table(head, rows)}\n\nThe peak is without weights and cache."


def _compile() -> str:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_8B.config()).to(torch.bfloat16)
    mesh, start, processor = Mesh.of(tp=8), time.perf_counter(), time.process_time()
    plan = parameter_plan(model, mesh, Options())
    planned = time.process_time() - processor
    packed = packed_model(model.eval().requires_grad_(False), generation_facts(model, None), mesh, plan, 8192)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    nodes = len(packed.stages[0].graph.graph.graph.nodes)
    cached = sum(layer.bytes_per_token for layer in packed.layers)
    return (
        f"Llama-3 8B for tp=8, on the meta device: {processor:.1f} s of the processor, {planned:.1f} s of them to plan "
        f"the parameters ({seconds:.1f} s by the clock); {nodes} nodes, {cached:,} bytes of a token per rank."
    )


if __name__ == "__main__":
    main()
