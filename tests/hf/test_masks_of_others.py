"""Masks that one model makes for another within it, and models of which only some attentions take facts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import eager_attention_forward

from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # registers the adapter
from autopar.options import Options
from autopar.testing.harness import check_model

LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}


def text(length: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (4, length), generator=g)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(4, length, generator=g) < 0.3, -100)}


def build(kind: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).double().train()


class Inner(nn.Module):
    """A language model that is given the mask of a model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.language = build("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA))

    def forward(self, input_ids: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        x = self.language.get_input_embeddings()(input_ids)
        mask = masking_utils.create_causal_mask(self.language.config, x, None, None, block_sequence_ids=groups)
        return self.language(inputs_embeds=x, attention_mask=mask, labels=labels).loss


def causal(model: nn.Module, batch: dict[str, Any]) -> list[bool]:
    """Of each attention, whether it is causal without a tensor."""
    gm = capture(model, batch, lift_to_float64=True)
    calls = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    return [bool(n.args[8]) and n.args[3] is None and n.args[4] is None for n in calls]


@pytest.mark.parametrize("two_ways", [False, True], ids=["causal", "a prefix that looks both ways"])
def test_facts_stay_facts_in_an_inner_model(two_ways: bool) -> None:
    model, batch = Inner().double(), text(16)
    if two_ways:
        batch["groups"] = torch.where(torch.arange(16) < 5, 0, -1).expand(4, 16).contiguous()
    assert causal(model, batch) == [not two_ways]
    assert check_model(model, batch, Mesh.of(dp=2, tp=2), Options(zero=3)).worst < 1e-10


def test_attention_in_own_code_beside_some_of_the_registry() -> None:
    """GIT's text attends in its own code, to a mask that it adds; its images by transformers' registry."""
    config = transformers.GitConfig(
        vision_config=TOWER, vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = build("GitForCausalLM", config)
    batch = {**text(15), "pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64)}
    assert check_model(model, batch, Mesh.of(dp=2, tp=2), Options(zero=3)).worst < 1e-10


def test_attention_in_own_code_beside_the_registry_in_one_config() -> None:
    """Informer's attentions share a config: one adds its mask to its scores, and is given one to add."""
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in SIZES.items()}
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, input_size=1, d_model=32,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        **sizes,
    )  # fmt: skip
    model = build("InformerForPrediction", config)
    g = torch.Generator().manual_seed(0)
    shapes = {"past_values": (4, 10), "past_time_features": (4, 10, 2), "future_values": (4, 4)}
    shapes |= {"future_time_features": (4, 4, 2)}
    batch = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    batch["past_observed_mask"] = torch.ones(4, 10, dtype=torch.float64)
    assert check_model(model, batch, Mesh.of(dp=2, tp=2), Options(zero=3)).worst < 1e-10


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_is_not_causal_by_itself(attention: str) -> None:
    """Without a mask PaliGemma attends in both directions, but causally with its attention written out."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GemmaConfig(
        **sizes, num_key_value_heads=1, head_dim=8, vocab_size=32, use_bidirectional_attention=True
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(config).double()
    ids = torch.randint(0, 32, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    assert check_model(model, batch, Mesh.of(dp=2)).worst < 1e-10


class Seen(nn.Module):
    """An attention that says it is causal, without a mask."""

    is_causal, num_key_value_groups = True, 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.qkv = config, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, None, scaling=0.3)[0].flatten(2)


class Unmasked(transformers.GemmaPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = Seen(config)
        self.gate = nn.Identity()
        setattr(self.gate, "config", 0.5)  # noqa: B010  (Idefics has such attributes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.seen(x) ** 2).mean()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_a_mask_only_sdpa_asks_the_module(attention: str) -> None:
    """BridgeTower's images attend in both directions, through layers that say that they are causal."""
    config = transformers.GemmaConfig(num_hidden_layers=1)
    config._attn_implementation = attention
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 5, 16, dtype=torch.float64)}
    model = Unmasked(config).double()
    assert check_model(model, batch, Mesh.of(dp=2)).worst < 1e-10
    assert causal(model, batch) == [attention == "sdpa"]


def sinks_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, sinks: Any = None
) -> Any:
    """Attention with one more logit for each query, which only absorbs probability: sinks [B, H, S, 1]."""
    scores = query @ key.transpose(2, 3) * scaling
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), None


class Sinking(Seen):
    """An attention with an argument that transformers' own do not know."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sink = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sinks_attention_forward)
        return attend(self, q, k, v, None, scaling=0.3, sinks=self.sink(x).mT.unsqueeze(-1))[0].flatten(2)


class SinkingOutOfSight(Sinking):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, None, scaling=0.3, sinks=self.sink(x).mT.unsqueeze(-1))[0].flatten(2)


class Around(transformers.PreTrainedModel):
    """A model of one attention. ``attention``: the implementation that is asked for."""

    config_class = transformers.LlamaConfig

    def __init__(self, kind: Any, attention: str) -> None:
        super().__init__(transformers.LlamaConfig(**LLAMA))
        self.config._attn_implementation_internal = attention
        self.inner = kind(self.config)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def test_attention_that_takes_more_than_ours_is_kept() -> None:
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    assert check_model(Around(Sinking, "eager").double(), {"x": x}, Mesh.of(dp=2, tp=2)).worst < 1e-10
    with pytest.raises(ValueError, match=r"capture: .*SinkingOutOfSight gives its attention a differentiable sinks"):
        capture(Around(SinkingOutOfSight, "eager"), {"x": x.float()})


def sigmoid_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> Any:
    return ((query @ key.mT).sigmoid() @ value).transpose(1, 2), None


def test_attention_that_a_user_has_registered_is_kept() -> None:
    transformers.AttentionInterface.register("of a user", sigmoid_attention)
    config = transformers.LlamaConfig(**{**LLAMA, "num_key_value_heads": 4})
    config._attn_implementation = "of a user"
    assert check_model(build("LlamaForCausalLM", config), text(8), Mesh.of(dp=2, tp=2)).worst < 1e-10


def experts_of_a_user(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The mean of all experts, without activations."""
    up, down = self.gate_up_proj.mean(0), self.down_proj.mean(0)
    return (hidden_states @ up.T)[:, : down.shape[1]] @ down.T * top_k_weights.sum(-1, keepdim=True)


def test_experts_that_a_user_has_registered_are_kept() -> None:
    transformers.integrations.moe.ExpertsInterface.register("of a user", experts_of_a_user)
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "of a user"
    assert check_model(build("MixtralForCausalLM", config), text(8), Mesh.of(dp=2, tp=2)).worst < 1e-10


class Asking(Seen):
    """An attention that is causal if it got no mask, as Moonshine's."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, q, k, v, mask, scaling=0.3, is_causal=mask is None)[0].flatten(2)


class Masked(Unmasked):
    """``made``: the function that makes its mask. ``kept``: 1 for tokens, 0 for padding."""

    def __init__(self, config: Any, made: Any) -> None:
        super().__init__(config)
        self.seen, self.made = Asking(config), made

    def forward(self, x: Tensor, kept: Tensor | None = None) -> dict[str, Tensor]:
        mask = self.made(self.config, x, kept)
        return {"loss": (self.seen(x, mask) ** 2).mean()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("made", [masking_utils.create_causal_mask, masking_utils.create_bidirectional_mask])
@pytest.mark.parametrize("padded", [False, True])
def test_a_module_that_asks_whether_it_got_a_mask(made: Any, attention: str, padded: bool) -> None:
    config = transformers.GemmaConfig(num_hidden_layers=1)
    config._attn_implementation = attention
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 5, 16, dtype=torch.float64)}
    if padded:
        batch["kept"] = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    model = Masked(config, functools.partial(made, past_key_values=None) if "causal" in made.__name__ else made)
    assert check_model(model.double(), batch, Mesh.of(dp=2)).worst < 1e-10
