"""The adapter for transformers: its models export with attention and experts as single `autopar::` operators.

Importing this file registers an attention, a mask and an experts implementation called "autopar" with transformers,
and the adapter in `autopar.capture.front_end.ADAPTERS`. The user's model is not changed: the implementation is set on
the structure copy that capture makes. Classes outside of the registries (falcon, bloom) keep their own attention.

Masks are passed as specifications (`models.hf_masks`), not as [S, S] tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from autopar.capture.front_end import ADAPTERS, GenerationFacts
from autopar.ir.weight_conversion import WeightConversion, as_they_are
from autopar.models.hf_batches import batch_dims, positions_of_images, static_inputs
from autopar.models.hf_capacity import capped_experts
from autopar.models.hf_checkpoints import recipes_to_load, recipes_to_save
from autopar.models.hf_examples import example_batches
from autopar.models.hf_experts import dispatch_own_experts
from autopar.models.hf_generation import generation_facts
from autopar.models.hf_images import FLASH, ImageReader, images_within, read_inputs, reads_images
from autopar.models.hf_masks import (
    OWN_MASKS,
    MaskFacts,
    facts_handed_inward,
    mask_facts,
    masks_made_when_traced,
    positions_from_user,
)
from autopar.models.hf_peft import AdapterFolder, is_peft
from autopar.models.hf_versions import has_post_norm, note_recorded

NAME = "autopar"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskFacts | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q, k, v [B, H, S, D] -> out [B, S, H, D].

    A mask specifies the attention pattern completely; without one, a causal module is causal, as in its sdpa path, but
    not in its "eager" one. Queries of one example may attend to keys of many.
    """
    borders = unused.get("cu_seq_lens_q")
    if borders is not None and borders.dim() == 2:  # of rows of images (`models.hf_images`)
        return _attention_in_rows(query, key, value, borders, dropout, scaling)
    if lost := next((name for name, x in unused.items() if isinstance(x, Tensor) and x.requires_grad), None):
        raise ValueError(
            f"capture: {type(module).__name__} gives its attention a differentiable {lost}, which transformers' own do "
            "not know; name its attention function ..._attention_forward with this parameter, or pass position_bias"
        )
    query = query.expand(max(query.shape[0], key.shape[0]), -1, -1, -1)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        was_eager = getattr(_config(module), OWN_MASKS, None) == "eager"
        facts = MaskFacts(causal=bool(causal) and query.shape[2] > 1 and not was_eager)
    elif isinstance(attention_mask, MaskFacts):
        facts = _as_without(attention_mask, getattr(module, "is_causal", True if is_causal is None else is_causal))
    else:
        facts = MaskFacts(tensor=attention_mask)
    bias = _bias(facts.tensor, position_bias, query)
    out, _ = torch.ops.autopar.attention(
        query, key, value, bias, facts.key_mask, facts.segments, s_aux, None, facts.causal,
        facts.window, facts.chunk, 0, float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        float(softcap or 0.0), float(dropout), 0, [], [], [],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _attention_in_rows(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, dropout: float, scaling: float | None
) -> tuple[Tensor, None]:
    """q, k, v [1, H, B * S, D], numbers of images or windows [B, S] -> out [1, B * S, H, D]"""
    _, heads, _, width = query.shape
    rows, length = segments.shape
    q, k, v = (x.reshape(heads, rows, length, width).transpose(0, 1) for x in (query, key, value))
    scale = float(width**-0.5 if scaling is None else scaling)
    out, _ = torch.ops.autopar.attention(
        q, k, v, None, None, segments, None, None, False, 0, 0, 0, scale, 0.0, float(dropout), 0, [], [], []
    )
    return out.transpose(1, 2).reshape(1, rows * length, heads, width), None


def _as_without(facts: MaskFacts, is_causal: bool) -> MaskFacts:
    """The pattern of a module that is not causal by itself (PaliGemma's) and may get no mask instead of a causal
    one."""
    if is_causal or not facts.causal or not facts.left_out:
        return facts
    if facts.key_mask is not None:
        raise ValueError(
            "capture: transformers attends in both directions here where no token is padding, and causally where one "
            "is; pass token_type_ids, which say what the model should attend to, leave attention_mask out, or use "
            "attn_implementation='eager', which is causal"
        )
    return replace(facts, causal=False)


def _bias(mask: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    """One additive bias from a materialized mask (bool or additive) and a position bias."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), float("-inf"))
    return mask if position_bias is None else position_bias + mask


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts signature: tokens [T, H], expert numbers and weights [T, K] -> [T, H].

    Activation and gate remain the model's code; weights may be [E, O, I] or transposed, with or without bias.
    """
    rows, order, offsets = torch.ops.autopar.moe_dispatch(hidden_states, top_k_index, self.num_experts)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    hidden = _project(self, rows, first, offsets)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    out = _project(self, hidden, "down_proj", offsets)
    if has_post_norm(self):
        out = self.post_expert_norm(out)
    combined: Tensor = torch.ops.autopar.moe_combine(out, order, top_k_weights)
    return combined.to(hidden_states.dtype)


def _project(experts: Any, rows: Tensor, name: str, offsets: Tensor) -> Tensor:
    weight = getattr(experts, name)
    out: Tensor = torch.ops.autopar.grouped_mm(rows.to(weight.dtype), weight, offsets, bool(experts.is_transposed))
    if experts.has_bias:
        out = torch.ops.autopar.grouped_bias(out, getattr(experts, f"{name}_bias"), offsets)
    return out


class TransformersAdapter:
    """See `autopar.capture.front_end.Adapter`."""

    def matches(self, model: nn.Module) -> bool:
        return any(isinstance(module, PreTrainedModel) for module in model.modules())

    def prepare(self, model: nn.Module) -> nn.Module:
        """Select our implementations in all configs of the copy, and for experts without one; disable caches."""
        configured = [(m, c) for m in model.modules() if (c := _config(m)) is not None]
        looked_up = {type(c) for m, c in configured if _looks_attention_up(m)}
        theirs = {type(c) for m, c in configured if _takes_more_than_ours(m)}
        for module, config in configured:
            own = {type(config), type(_of_text(config))}
            ours = not looked_up.isdisjoint(own) if looked_up else _registered(module)
            _configure(config, ours and theirs.isdisjoint(own))
        dispatch_own_experts(model)
        return model

    def in_float32(self, model: nn.Module) -> list[str]:
        """Parameters that the model classes keep in float32, always or only for float16 (treated alike here)."""
        asked = [
            name
            for module in model.modules()
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for name in getattr(module, attribute, None) or ()
        ]
        return sorted(set(asked))

    def arguments(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch, without a cache and with a ModelOutput."""
        if batch.get("cu_seq_lens_q") is not None and batch.get("position_ids") is None:
            raise ValueError(
                "parallelize: documents of packed rows are read from position_ids that start anew, found cu_seq_lens_q "
                "without them; use DataCollatorWithFlattening(return_position_ids=True)"
            )
        known = inspect.signature(model.forward).parameters
        arguments = {k: v for k, v in batch.items() if v is not None and k not in ("use_cache", "return_dict")}
        if "use_cache" in known:
            arguments["use_cache"] = False
        _hook_recorded(model, arguments)
        read_inputs(model, batch)
        return arguments

    @contextlib.contextmanager
    def context(self, batch: Mapping[str, Any]) -> Iterator[None]:
        given = batch.get("position_ids") is not None
        with positions_from_user(given), facts_handed_inward(), masks_made_when_traced(), images_within():
            yield

    @contextlib.contextmanager
    def reference(self, model: nn.Module, capacity: float = 0.0) -> Iterator[None]:
        with exact_experts(model), capped_experts(model, capacity):
            yield

    def inputs_from_values(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """See `autopar.capture.front_end.as_captured`."""
        return positions_of_images(model, batch), static_inputs(batch)

    def image_reader(self, model: nn.Module, lift: bool) -> ImageReader | None:
        """See `autopar.runtime.inputs.image_padding`."""
        return ImageReader(model, self.prepare, lift) if reads_images(model) else None

    def generation(self, model: nn.Module) -> GenerationFacts:
        return generation_facts(model.get_base_model() if is_peft(model) else model)  # type: ignore[operator]

    def example_batches(self, model: nn.Module) -> list[dict[str, Any]]:
        return example_batches(model.get_base_model() if is_peft(model) else model)  # type: ignore[operator]

    def settle(self, model: nn.Module) -> None:
        """Repeat side effects of constructing a model, in a process that received a pickled one: they affect keys of
        compiled steps. Models patch a method into torch's modules and register what their classes record."""
        PreTrainedModel.initialize_weights(_NoModel())  # type: ignore[arg-type]
        made = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        for module in made:
            note_recorded(module)
        for outermost in made[:1]:
            outermost._can_set_experts_implementation()

    def own_folder(self, model: nn.Module) -> AdapterFolder | None:
        return AdapterFolder(model) if is_peft(model) else None

    def batch_dims(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, int | None]:
        return batch_dims(model, batch)

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Compute the non-persistent buffers (rotary tables, position ids) of a model on the meta device.

        They are in no checkpoint; transformers' weight initialization computes them.
        """
        out: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            names = [
                n for n in module._non_persistent_buffers_set if (b := module._buffers[n]) is not None and b.is_meta
            ]
            if not names:
                continue
            owner = next(m for m in reversed(_parents(model, path)) if isinstance(m, PreTrainedModel))
            real = copy.deepcopy(module).to_empty(device="cpu", recurse=False)
            owner._init_weights(real)
            for name in names:
                out[f"{path}.{name}" if path else name] = real._buffers[name]
        return out

    def recipes_to_load(self, model: nn.Module, names: list[str]) -> list[WeightConversion]:
        return recipes_to_load(model, names) if isinstance(model, PreTrainedModel) else as_they_are(names)

    def recipes_to_save(self, model: nn.Module, names: list[str]) -> list[WeightConversion]:
        return recipes_to_save(model, names) if isinstance(model, PreTrainedModel) else as_they_are(names)


def _hook_recorded(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Register the hooks with which transformers records values of layers (``output_router_logits``). The first
    forward that needs them would do so itself, which would be a side effect during the capture."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            asked = [f"output_{key}" for key in module._can_record_outputs or ()]
            if any(arguments.get(key, getattr(module.config, key, False)) for key in asked):
                maybe_install_capturing_hooks(module)


def _parents(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules from the root to the one at ``path``, both included."""
    found = [model]
    for part in path.split(".") if path else ():
        found.append(found[-1].get_submodule(part))
    return found


def _config(module: nn.Module) -> Any:
    found = getattr(module, "config", None)
    return found if isinstance(found, transformers.PreTrainedConfig) else None


def _of_text(config: Any) -> Any:
    """The text config of a model; that of the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def _registered(module: nn.Module) -> bool:
    """Whether the Python module of a model uses transformers' attention registry."""
    return hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def _looks_attention_up(module: nn.Module) -> bool:
    """Whether a forward uses transformers' attention registry. (Other classes of the same file may not.)"""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _takes_more_than_ours(module: nn.Module) -> bool:
    """Whether a forward may give arguments to its attention that ours does not know and would leave out."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = [n for n in code.co_names if n.endswith("attention_forward")] if code is not None else []
    attentions = [vars(sys.modules[type(module).__module__]).get(name) for name in names]
    return any(inspect.signature(f).parameters.keys() - _KNOWN for f in attentions if inspect.isfunction(f))


def _is_users(table: Mapping[str, Any], name: str | None) -> bool:
    """Whether user code has registered an attention, or experts, of this name, which may compute something else."""
    found = table.get(name) if name is not None and "/" not in name else None  # "/": kernels of the hub
    place = getattr(found.func if isinstance(found, functools.partial) else found, "__module__", "")
    return found is not None and place.partition(".")[0] not in ("transformers", "autopar")


def _configure(config: Any, registered: bool) -> None:
    attention, experts = config._attn_implementation_internal, getattr(config, "_experts_implementation_internal", None)
    if registered and attention != NAME and not _is_users(ALL_ATTENTION_FUNCTIONS, attention):
        setattr(config, OWN_MASKS, config._attn_implementation_internal)
        config._attn_implementation_internal = NAME
    if not _is_users(ALL_EXPERTS_FUNCTIONS, experts):
        config._experts_implementation_internal = NAME
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config.return_dict = True


@contextlib.contextmanager
def exact_experts(model: nn.Module) -> Iterator[None]:
    """Context manager: the user's model runs its experts one by one, as plain products, for an exact reference run:
    transformers' default kernel does not support float64."""
    found = {id(c): c for m in model.modules() if (c := _config(m)) is not None}
    before = {key: getattr(c, "_experts_implementation_internal", None) for key, c in found.items()}
    configs = {key: c for key, c in found.items() if not _is_users(ALL_EXPERTS_FUNCTIONS, before[key])}
    for config in configs.values():
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation_internal = before[key]


_KNOWN = {*inspect.signature(attention_forward).parameters, "sliding_window", "kwargs"}  # of the window, masks know


class _NoModel(nn.Module):
    """A model without weights to initialize."""

    def is_custom_code(self) -> bool:
        return False

    is_remote_code = is_custom_code  # its name in 5.10

    def _initialize_weights(self, *_: Any) -> None:
        pass


for _name in (NAME, FLASH):
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, mask_facts)
ExpertsInterface.register(NAME, experts_forward)
ADAPTERS.append(TransformersAdapter())
