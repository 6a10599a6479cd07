"""From a transformers config.json to a model without weights, and a batch of shapes for it.

model = build("config.json", torch.bfloat16)        on the meta device: nothing is allocated
batch = batch_of(model, batch=8, seq=8192)          {"input_ids": [8, 8192], "labels": [8, 8192]}
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from autopar.models import hf as hf  # registers the adapter
from autopar.models.hf_examples import example_batches
from autopar.runtime.inputs.padding import POSITIONS
from autopar.values import dtype_name, parse

# Tried in order for a config that names no class: a BERT is in the lists of masked and of causal models.
AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModelForCTC",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
)
_BY_TOKEN = ("input_ids", "labels", "decoder_input_ids")
_CLASS = re.compile(r"<class '([^']*)'>")
_MOST_SAID = 600  # characters
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """'bfloat16', 'bf16' -> torch.bfloat16. Raises ValueError for an unknown name."""
    name = dtype_name(name)
    if name not in _DTYPES:
        raise ValueError(f"dtype: unknown dtype {name!r}; the dtypes are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_config(path: str | Path) -> PreTrainedConfig:
    """Read the config of a config.json, or of a folder with one. Raises ValueError for an invalid file."""
    file = Path(path)
    try:
        file = file / "config.json" if file.is_dir() else file
        there = file.is_file()
    except (OSError, ValueError):  # an invalid file name, or a cycle of links
        there = False
    if not there:
        raise ValueError(f"config: no file {str(file)!r}; give the path of a transformers config.json")
    try:
        data: Any = parse(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {str(file)!r} is not JSON: not UTF-8 from byte {error.start} on") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"config: {str(file)!r} is not JSON: {error}; give a transformers config.json") from error
    if not isinstance(data, dict):
        raise ValueError(f"config: {str(file)!r} has no model_type; it must be the config.json of a transformers model")
    return config_of(data, repr(str(file)))


def config_of(values: Mapping[str, Any], name: str = "the config") -> PreTrainedConfig:
    """The config with the values of a config.json; ``name`` is for messages. Raises ValueError."""
    data = dict(values)
    kind = data.pop("model_type", None)
    if not isinstance(kind, str):
        raise ValueError(f"config: {name} has no model_type; it must be the config.json of a transformers model")
    try:
        return AutoConfig.for_model(kind, **data)
    except Exception as error:  # the class of the config may raise anything
        if kind in transformers.CONFIG_MAPPING:
            raise ValueError(f"config: {kind} does not take the values of {name}: {_said(error)}") from error
        raise ValueError(
            f"config: transformers {transformers.__version__} has no model_type {kind!r}, named in {name}; "
            f"{_similar(kind)}"
        ) from error


def _said(error: Exception) -> str:
    """An error of transformers in one line, without names of Python types."""
    lines = [line.strip().removeprefix("TypeError: ").removeprefix("ValueError: ") for line in str(error).splitlines()]
    text = " ".join(filter(None, lines))
    if isinstance(error, (AttributeError, KeyError, TypeError, IndexError)):
        return "a value of another type, or a name, that it does not know"
    return _CLASS.sub(lambda found: found[1].rpartition(".")[2], text)[:_MOST_SAID]


def _similar(kind: str) -> str:
    close = difflib.get_close_matches(kind, list(transformers.CONFIG_MAPPING.keys()), n=1)
    return f"did you mean {close[0]!r}?" if close else "some that it has are llama, gpt2, bert and t5"


def build(config: PreTrainedConfig, dtype: torch.dtype, device: str = "meta") -> PreTrainedModel:
    """Build the model of a config: of the class that it names, else the first of `AUTO_CLASSES` that supports it.

    Raises ValueError for a model type without such a class, and for sizes that the class rejects.
    """
    make = _maker(config)
    try:
        with torch.device(device):
            model: PreTrainedModel = make(config, dtype)
    except Exception as error:  # the class of the model may raise anything
        raise ValueError(
            f"config: {type(config).__name__} cannot be built: {_said(error)}; compare with the config.json of a "
            "model that works"
        ) from error
    return model.train()


def _maker(config: PreTrainedConfig) -> Any:
    names = config.architectures or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config: architectures needs a list of class names, found {names!r}")
    for found in (getattr(transformers, name, None) for name in names):
        if found is None or not hasattr(found, "_from_config"):
            continue
        takes = getattr(found, "config_class", None)
        if isinstance(takes, type) and not isinstance(config, takes):
            raise ValueError(
                f"config: architectures names {found.__name__}, which is no model of type {config.model_type!r}"
            )
        return lambda config, dtype: found._from_config(config, dtype=dtype)
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return lambda config, dtype: auto.from_config(config, dtype=dtype)
    raise ValueError(
        f"config: no training model for model_type {config.model_type!r}; name one in the config's architectures, "
        "such as LlamaForCausalLM"
    )


def batch_of(
    model: PreTrainedModel, batch: int, seq: int, device: str = "meta", packed: bool = False
) -> dict[str, Tensor]:
    """The shapes of a training batch: ``batch`` examples of ``seq`` tokens each, as `autopar.capture.front_end` takes
    them. ``packed``: with positions, which say where documents end by starting anew, if the model takes them.

    Images and audio have the sizes of the config; ``seq`` is then the length of the labels, if they are tokens.
    Raises ValueError for models whose inputs are neither tokens, images nor audio, and for sequences that are
    longer than a table of positions.
    """
    found = next((batch for batch in example_batches(model) if _all_tensors(batch)), None)
    if found is None:
        name = type(model).__name__
        raise ValueError(f"config: cannot tell the inputs of {name}; it takes no tokens, images or audio")
    _check_positions(model.config, seq)
    shapes = {
        name: (batch, seq) if name in _BY_TOKEN and value.dim() == 2 else (batch, *value.shape[1:])
        for name, value in found.items()
    }
    made = {name: torch.zeros(shape, dtype=found[name].dtype, device=device) for name, shape in shapes.items()}
    if packed and "input_ids" in made and "position_ids" in inspect.signature(model.forward).parameters:
        made["position_ids"] = torch.zeros_like(made["input_ids"])
    return made


def _all_tensors(batch: dict[str, Any]) -> bool:
    return all(isinstance(x, Tensor) for x in batch.values())


def beyond_positions(path: str | Path, seq: int) -> str:
    """A warning for a sequence longer than the model was made for, else ""."""
    config = load_config(path)
    limits = [(name, getattr(config, name, None)) for name in POSITIONS]
    name, limit = next(((name, n) for name, n in limits if isinstance(n, int) and n > 0), ("", seq))
    if seq <= limit:
        return ""
    return (
        f"sequence: {config.model_type} is made for {limit} positions ({name}), found a length of {seq}; the plan is "
        "right, what the model learns there is another matter"
    )


def _check_positions(config: PreTrainedConfig, seq: int) -> None:
    """Learned position tables have a limit; rotary embeddings do not."""
    if getattr(config, "rope_parameters", None):
        return
    for name in POSITIONS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and 0 < limit < seq:
            raise ValueError(f"sequence: {config.model_type} has {limit} positions ({name}), found a length of {seq}")
