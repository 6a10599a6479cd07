"""The HTTP server over `Server`: with a runner whose tokens are a function of the request, and of a model on ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

import httpx
import openai
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.serving.server import Server
from tests.http_server.fake_engine import EOS, VOCABULARY, client_of, post, serving, tokenizer
from tests.serving.fake_runner import VOCAB, FakeRunner, expected


def make(**more: Any) -> tuple[FakeRunner, Any]:
    runner = FakeRunner([200])
    given: dict[str, Any] = {"max_length": 64, "vocabulary": VOCAB, "step_tokens": 32, "max_running": 8}
    return runner, Server(runner, **given | more)


def test_tokens_seeds_stops_and_errors() -> None:
    runner, engine = make()
    prompt = [5, 7, 9]
    with serving(engine) as address:
        client = client_of(address)
        found = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=8, seed=3)
        texts = [bytes(expected(prompt, seed, 8)).decode() for seed in (3, 4)]
        assert [choice.text for choice in found.choices] == texts
        assert found.usage is not None and found.usage.completion_tokens == 16
        stop = texts[0][3:5]
        chunks = [*client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=3, stop=stop, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0].partition(stop)[0]
        assert chunks[-1].choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="at most 64 tokens together"):
            client.completions.create(model="tiny", prompt=[1] * 64)
        text = httpx.get(f"{address}/metrics").text
        assert 'autopar_requests_total{finish_reason="stop"} 1.0' in text and "autopar_running 0.0" in text
        runner.fails_at = runner.steps + 3
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        health = httpx.get(f"{address}/health")
        assert health.status_code == 503 and "the device is gone" in health.json()["error"]["message"]
        assert post(address, "completions", prompt=prompt).status_code == 503


def test_a_full_queue() -> None:
    _, engine = make(max_waiting=1)
    with serving(engine) as address, pytest.raises(openai.RateLimitError, match="no room for 2 more"):
        client_of(address).completions.create(model="tiny", prompt=[[1], [2]])


@pytest.mark.parametrize("ranks", ["--mesh tp=2", "--attention tp=1 --experts ep=1 --apart mlp --microbatches 2"])
def test_a_model_on_two_ranks(tmp_path: Path, ranks: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, eos_token_id=EOS, **sizes))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    prompt = [*b"Hello"]
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    words = [sys.executable, "-m", "autopar", "serve", str(tmp_path), *ranks.split(), "--port", "0"]
    process = subprocess.Popen([*words, "--max-length", "200", "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if "serving" in line), "")
        address = re.findall(r"http://[\d.]+:\d+", line)[0]
        client = client_of(address)
        found = client.completions.create(model=tmp_path.name, prompt="Hello", max_tokens=12, temperature=0)
        assert found.choices[0].text == tokenizer().decode(tokens, skip_special_tokens=True)
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        chat = client.chat.completions.create(
            model=tmp_path.name,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=100,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            logit_bias={str(token): -100 for token in b" \n\t\r"},
        )
        assert json.loads(chat.choices[0].message.content or "")["a"] in (1, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
