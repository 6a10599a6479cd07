"""Classes of transformers are planned without an example_batch, or say what was tried and ask for it."""

from __future__ import annotations

import re

import pytest

from tests.hf.every_class import ASKS, PLANNED, class_names, outcome

SOME = [
    "CLIPModel",  # tokens and images, a loss by return_loss
    "LayoutLMModel",  # tokens and boxes
    "BertForMultipleChoice",  # tokens [rows, choices, length]
    "ASTForAudioClassification",  # a spectrogram as input_values
    "Wav2Vec2BertModel",  # features [frames, features]
    "TimeSeriesTransformerModel",  # a past with its lags and times
    "DecisionTransformerModel",
    "SwitchTransformersForConditionalGeneration",  # makes the masks that it needs only where nobody traces it
    "DPTForDepthEstimation",  # labels that nobody implements
]


@pytest.mark.parametrize("name", SOME)
def test_planned_without_a_batch(name: str) -> None:
    assert outcome(name) == PLANNED


@pytest.mark.parametrize("name, told", [
    ("InstructBlipVideoForConditionalGeneration", r"tried .*pixel_values: float32 \[2, 3, 224, 224\].*to unpack"),
    ("GlmImageVisionModel", ""),
])  # fmt: skip
def test_where_that_fails_it_asks(name: str, told: str) -> None:
    words = outcome(name)
    assert words.startswith(f"parallelize: {ASKS} {name}") and "pass example_batch={...}" in words
    assert re.search(told, words)


@pytest.mark.full
@pytest.mark.parametrize("name", class_names())
def test_every_class(name: str) -> None:
    """Nothing but a plan, the question, or a refusal of what the forward does: anything else is raised."""
    assert outcome(name)
