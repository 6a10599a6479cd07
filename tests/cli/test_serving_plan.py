"""`autopar plan --serve`: what it counts, against the sizes of the config; its tables; its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.report.tables import human_bytes, human_seconds
from tests.cli.test_cli import BERT, LLAMA, run

WINDOWS = {
    "model_type": "gemma3_text", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 6, "max_position_embeddings": 4096,
    "sliding_window": 512,
}  # fmt: skip


def served(
    capsys: pytest.CaptureFixture[str], folder: Path, model: dict[str, Any], *more: object
) -> tuple[int, str, str]:
    config = folder / "config.json"
    config.write_text(json.dumps(model))
    return run(capsys, "plan", "--serve", "--config", config, *more)


def test_numbers_are_those_of_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ("--mesh", "dp=2,tp=2", "--max-length", 2048, "--cache", "1MB", "--dump", tmp_path / "dump", "--json")
    code, out, err = served(capsys, tmp_path, LLAMA, *more)
    assert code == 0, err
    found = json.loads(out)
    assert (found["ranks"], found["replicas"], found["max_length"]) == (4, 2, 2048)
    of_layer = 2 * 8 * 2  # a key and a value of one head of width 8, in bf16
    assert found["layers"] == [
        {"window": 0, "layers": 2, "layers_of_rank": 2, "heads": 1, "key_width": 8, "value_width": 8, "dtype": "bf16",
         "bytes": 2 * of_layer},
    ]  # fmt: skip
    cache = found["cache"]
    assert (cache["bytes"], cache["bytes_per_token"]) == (10**6, 2 * of_layer)
    assert cache["bytes_per_request"] == 2048 * 2 * of_layer
    pages = 10**6 // (256 * 2 * of_layer) - 1  # one is for padding
    assert (cache["requests"], cache["tokens"]) == (pages // 8, pages // 8 * 2048)
    whole = 2 * (2 * 64 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32))
    norms = 2 * 32 * 5  # replicated
    assert found["weights"]["model"] == whole
    assert found["weights"]["parameters"] == (whole - norms) // 2 + norms
    assert [(row["kind"], row["requests"], row["tokens"], row["keys"]) for row in found["steps"]] == [
        ("decode", 1, 1, 1024), ("decode", 8, 8, 1024), ("decode", 64, 64, 1024), ("prefill", 1, 512, 1024),
    ]  # fmt: skip
    decode = [row["seconds"] for row in found["steps"][:3]]
    assert decode == sorted(decode) and decode[0] > 0
    assert all(row["tokens_per_second"] == row["tokens"] / row["period"] for row in found["steps"])
    assert {"report.html", "communication.txt"} <= {p.name for p in (tmp_path / "dump").iterdir()}


def test_a_step_of_a_large_model_takes_as_long_as_its_weights_and_keys_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    large = LLAMA | {"hidden_size": 8192, "intermediate_size": 65536, "head_dim": 128, "num_key_value_heads": 4}
    more = ("--mesh", "tp=1", "--max-length", 2048, "--cache", "40GB", "--target-hardware", "H100", "--json")
    code, out, err = served(capsys, tmp_path, large, *more)
    assert code == 0, err
    found = json.loads(out)
    assert found["device"] == "H100"
    weights, keys = found["weights"]["model"], 1024 * found["cache"]["bytes_per_token"]
    one, _, many, _ = found["steps"]
    assert weights / 3.35e12 < one["seconds"] < 1.4 * (weights + keys) / 3.35e12
    assert many["seconds"] > (weights + 64 * keys) / 3.35e12


def test_windows_and_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ("--mesh", "tp=2,pp=2", "--max-length", 4096, "--step-tokens", 256)
    code, out, err = served(capsys, tmp_path, WINDOWS, *more, "--json")
    assert code == 0, err
    found = json.loads(out)
    of_layer = 2 * 8 * 2
    assert [(row["window"], row["layers"], row["layers_of_rank"]) for row in found["layers"]] == [
        (0, 1, 1),
        (512, 5, 2),
    ]
    assert [row["bytes"] for row in found["layers"]] == [of_layer, 2 * of_layer]
    held = 4 * 256  # pages of 512 - 1 + 256 tokens, and one more where they begin within a page
    assert found["cache"]["windows"] == [{"window": 512, "tokens": held}]
    assert found["cache"]["bytes_per_request"] == (4096 + 2 * held) * of_layer
    assert all(row["seconds"] / 2 <= row["period"] < row["seconds"] for row in found["steps"])
    code, text, _ = served(capsys, tmp_path, WINDOWS, *more)
    assert code == 0 and "pages behind a window of 512 are given back" in text
    assert human_bytes(found["cache"]["bytes_per_request"]) in text and human_bytes(found["cache"]["bytes"]) in text
    assert human_seconds(found["steps"][0]["seconds"]) in text


def test_several_meshes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ("--mesh", "tp=2", "--mesh", "cp=2")
    code, out, err = served(capsys, tmp_path, LLAMA, *more, "--json")
    assert code == 0, err
    first, second = json.loads(out)
    assert first["mesh"] == {"tp": 2} and first["max_length"] == 2048, "all positions of the model"
    assert "found axis cp=2" in second["refused"]
    code, text, _ = served(capsys, tmp_path, LLAMA, *more)
    assert code == 0 and "served on tp=2" in text and "cp=2: serve: " in text


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (
            LLAMA,
            ("--cache", "4KB"),
            "cache: a request of 4096 tokens needs 557056 bytes per rank, found 4000;",
        ),
        (LLAMA, ("--cache", "much"), "cache: expected a number of bytes"),
        (LLAMA, ("--batch", 8), "--serve needs no batch, found --batch 8; leave it out"),
        (LLAMA, ("--max-length", 5000), "serve: max_length 5000 is beyond the 2048 positions of LlamaForCausalLM"),
        (LLAMA, ("--memory-limit", "10KB"), "cache: the weights of a rank need"),
        (BERT, ("--max-length", 32), "queries attend to later tokens"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any], more: tuple[object, ...], said: str
) -> None:
    if "--max-length" not in more:
        model = model | {"max_position_embeddings": 4096}
    code, _, err = served(capsys, tmp_path, model, "--mesh", "tp=1", *more)
    assert code == 2 and said in err and err.count("\n") == 1, err


def test_options_of_serving_need_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    code, _, err = run(capsys, "plan", "--config", config, "--mesh", "tp=2", "--cache", "4GB")
    assert (code, err) == (2, "autopar: --cache is of plans to serve a model, found none; add --serve\n")
