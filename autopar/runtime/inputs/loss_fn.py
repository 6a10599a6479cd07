"""A custom loss, outside of the model and traced with it: ``parallelize(model, mesh, loss=fn)``.

    def fn(outputs, batch): return F.kl_div(...) + 0.1 * outputs.loss        a scalar, of outputs and inputs
    class Distilled(nn.Module): ...                                          or a module, which may have weights

The model gets the inputs that its forward names, the loss gets all of them. The result is the model's output with this
loss in it. Weights of a loss are parameters ``own_loss. ...``: sharded like all others, trained unless they are frozen,
and not in the folders of `save_pretrained`.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.capture.trace.export import flatten

LOSS = "own_loss"  # the module's name in the model
COTANGENT = "cotangent_"  # inputs: the gradient of a loss with respect to an output


def with_loss(model: nn.Module, loss: Callable[[Any, Mapping[str, Any]], Any]) -> nn.Module:
    """A model of the same modules and parameters whose forward ends in the loss; ``model`` itself is not changed.
    Raises ValueError for an invalid loss."""
    if not callable(loss):
        raise ValueError(f"loss: needs a function of (outputs, batch), found {loss!r}; return a scalar from it")
    if hasattr(model, LOSS):
        raise ValueError(
            f"loss: needs the name {LOSS!r} in the model, found an attribute of that name; rename the model's attribute"
        )
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None, {})
    except TypeError as error:
        raise ValueError(f"loss: needs a function of (outputs, batch), found another signature: {error}") from None
    except ValueError:
        pass  # a built-in function: the call itself raises
    made: nn.Module = type(model).__new__(type(model))
    made.__dict__.update(model.__dict__)
    made.__dict__["_modules"] = dict(model._modules)
    if isinstance(loss, nn.Module):
        made._modules[LOSS] = loss
    forward: Any = model.forward
    if getattr(forward, "__self__", None) is model:
        forward = forward.__func__.__get__(made)
    made.__dict__["forward"] = _ending_in(forward, loss)
    return made


def _ending_in(forward: Callable[..., Any], loss: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    takes = {p.name for p in named}

    @functools.wraps(forward)
    def with_own_loss(*args: Any, **batch: Any) -> Any:
        outputs = forward(*args, **{name: x for name, x in batch.items() if name in takes})
        given = signature.bind_partial(*args).arguments | batch
        return _combined(outputs, loss(outputs, given))

    more = inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD)
    with_own_loss.__dict__["__signature__"] = signature.replace(parameters=[*named, more])
    return with_own_loss


def _combined(outputs: Any, loss: Any) -> Any:
    """The model's outputs, with the loss. Raises ValueError for a loss that is not a scalar."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss: needs to return one scalar, found {found}; return the (weighted) sum of its terms")
    if isinstance(outputs, Mapping):
        return {**outputs, "loss": loss}
    return {"loss": loss, "outputs": outputs}


def of_the_model(name: str) -> bool:
    """Whether a parameter or buffer is the model's, and not its loss's."""
    return not name.startswith(f"{LOSS}.")


def with_cotangents(model: nn.Module, places: Sequence[int]) -> nn.Module:
    """A model whose loss has given gradients with respect to its outputs: inputs ``cotangent_0``, ... for the tensors
    at these places of the flat outputs. The loss, the sum of outputs times cotangents, is its only output."""
    made: nn.Module = type(model).__new__(type(model))
    made.__dict__.update(model.__dict__)
    forward: Any = model.forward
    if getattr(forward, "__self__", None) is model:
        forward = forward.__func__.__get__(made)
    signature = inspect.signature(forward)
    names = [f"{COTANGENT}{place}" for place in places]

    @functools.wraps(forward)
    def with_given(*args: Any, **batch: Any) -> Any:
        given = [batch.pop(name) for name in names]
        found = [x for x in flatten(forward(*args, **batch))[0] if isinstance(x, Tensor)]
        terms = [(found[place] * x).sum() for place, x in zip(places, given, strict=True)]
        return {"loss": functools.reduce(operator.add, terms)}

    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    taken = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    with_given.__dict__["__signature__"] = signature.replace(parameters=[*named, *taken, *more])
    made.__dict__["forward"] = with_given
    return made
