"""The peers that generate, each as a function of prompts and numbers of new tokens -> (processor seconds, tokens)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

import autopar
from autopar.serving.server import Server

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, Sequence[int]], tuple[float, list[list[int]]]]


def ours(server: Server) -> Generate:
    """All requests at once; the server decides which run."""

    def run(prompts: Prompts, new: Sequence[int]) -> tuple[float, list[list[int]]]:
        start = time.process_time()
        asked = [autopar.Sampling(temperature=0.0, ignore_eos=True, max_tokens=n) for n in new]
        tickets = server.generate([list(p) for p in prompts], asked)
        found = [list(ticket.result()) for ticket in tickets]
        return time.process_time() - start, found

    return run


def static_batches(model: Any, rows: int, **how: Any) -> Generate:
    """transformers' generate on batches of ``rows`` requests, padded on the left; each goes on until its longest is
    done."""

    def run(prompts: Prompts, new: Sequence[int]) -> tuple[float, list[list[int]]]:
        start, found = time.process_time(), list[list[int]]()
        for at in range(0, len(prompts), rows):
            mine, wanted = prompts[at : at + rows], new[at : at + rows]
            longest = max(map(len, mine))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in mine])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in mine])
            with torch.no_grad():
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=max(wanted), do_sample=False, pad_token_id=0, **how
                )
            found += [row[longest : longest + n].tolist() for row, n in zip(out, wanted, strict=True)]
        return time.process_time() - start, found

    return run


def continuous(model: nn.Module, rows: int, blocks: int) -> Generate:
    """transformers' continuous batching of ``rows`` requests at a time. Its thread is started before the clock and
    stopped after it."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(prompts: Prompts, new: Sequence[int]) -> tuple[float, list[list[int]]]:
        how = ContinuousBatchingConfig(
            page_size=64, num_blocks=blocks, max_batch_tokens=512, max_requests_per_batch=rows, use_cuda_graph=False
        )
        with model.continuous_batching_context_manager(  # type: ignore[operator]
            generation_config=config, continuous_batching_config=how, warmup=False
        ) as manager:
            start = time.process_time()
            names = [manager.add_request(list(p), max_new_tokens=n) for p, n in zip(prompts, new, strict=True)]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=10)
                if result is None:
                    raise RuntimeError("transformers' continuous batching gave no result for 10 s")
                if result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            seconds = time.process_time() - start
        return seconds, [found[name] for name in names]

    return run
