"""F: gradients that are switched off within a forward, and what it asks torch about itself."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece

QUESTIONS = (  # true or false in a plain step; a forward that is traced must get the same answers
    "torch.is_grad_enabled()",
    "torch.compiler.is_compiling()",
    "torch.compiler.is_exporting()",
    "torch.compiler.is_dynamo_compiling()",
    "torch._dynamo.is_compiling()",
    "torch.jit.is_tracing()",
    "torch.jit.is_scripting()",
    "torch.onnx.is_in_onnx_export()",
    "torch.is_inference_mode_enabled()",
    "torch.is_autocast_enabled('cpu')",
    "self.training",
    "x.requires_grad",
    "x.detach().requires_grad",
    "x.grad_fn is None",
    "x.is_leaf",
    "x.is_inference()",
    "type(x) is torch.Tensor",
    "self.w_N.is_leaf",
    "self.w_N.requires_grad",
    "isinstance(self.w_N, nn.Parameter)",
    "type(self.w_N) is nn.Parameter",
    "torch.overrides.is_tensor_like(x)",
    "x.is_contiguous()",
    "x.device.type == 'cpu'",
    "torch.are_deterministic_algorithms_enabled()",
)


def mode(name: str, forward: str, top: str = "", init: str = "", changes: tuple[str, ...] = ()) -> Piece:
    return Piece(name, "F", forward, top, init, changes)


MODE_PIECES = [
    *(
        mode(
            f"asks {question}",
            f"x = x * self.w_N\nif {question}:\n    x = torch.tanh(x)\nelse:\n    x = 0.5 * torch.sin(x)",
            init="self.w_N = nn.Parameter(torch.rand(3))",
            changes=("own.w_N.requires_grad_(False)",),
        )
        for question in QUESTIONS
    ),
    mode("is_compiling, by its name", "x = torch.tanh(x) if is_compiling_N() else torch.sin(x)", "is_compiling_N = torch.compiler.is_compiling"),
    mode("is_grad_enabled, by its name", "x = torch.tanh(x) if asked_N() else torch.sin(x)", "asked_N = torch.is_grad_enabled"),
    mode("returns what it asks", "out['asked_N'] = torch.tensor(float(torch.is_grad_enabled()))"),
    # --- no gradients within
    mode("no_grad", "with torch.no_grad():\n    s = x.mean(0)\nx = x - s"),
    mode("no_grad of all, and a way around", "with torch.no_grad():\n    h = torch.tanh(self.lin_N(x))\nx = x + h", init="self.lin_N = nn.Linear(3, 3)"),
    mode("a function without gradients", "x = x * f_N(x)", "@torch.no_grad()\ndef f_N(x):\n    return x.sigmoid()"),
    mode("a decorator of inference_mode", "x = x + f_N(x)", "@torch.inference_mode()\ndef f_N(x):\n    return x.sigmoid()"),
    mode("inference_mode", "with torch.inference_mode():\n    s = x.mean(0)\nx = x - s"),
    mode("inference_mode, cloned", "with torch.inference_mode():\n    s = x.abs().mean(0)\nx = x * s.clone()"),
    mode("inference_mode of a layer", "with torch.inference_mode():\n    h = torch.tanh(self.lin_N(x))\nx = x + h", init="self.lin_N = nn.Linear(3, 3)"),
    mode("inference_mode of a number", "with torch.inference_mode():\n    s = 0.5\nx = x * s"),
    mode("inference_mode(False)", "with torch.inference_mode(False):\n    x = torch.tanh(x)"),
    mode("enable_grad within no_grad", "with torch.no_grad():\n    h = torch.tanh(x)\n    with torch.enable_grad():\n        x = torch.sin(x)\nx = x + h"),
    mode("set_grad_enabled of a flag", "with torch.set_grad_enabled(on_N):\n    h = torch.tanh(x)\nx = 0.5 * x + h", "on_N = False", changes=("mod.on_N = True",)),
    mode("set_grad_enabled as a function", "before = torch.is_grad_enabled()\ntorch.set_grad_enabled(False)\nh = torch.tanh(x)\ntorch.set_grad_enabled(before)\nx = x + h"),
    mode("a kept no_grad", "with quiet_N:\n    h = torch.tanh(x)\nx = x + h", "quiet_N = torch.no_grad()"),
    mode("a context that is switched", "with (torch.no_grad() if on_N else contextlib.nullcontext()):\n    h = torch.tanh(x)\nx = 0.5 * x + h", "on_N = True", changes=("mod.on_N = False",)),
    mode("asked within no_grad", "with torch.no_grad():\n    s = 0.5 if torch.is_grad_enabled() else 0.7\nx = x * s"),
    mode("asked within enable_grad", "with torch.enable_grad():\n    s = 0.5 if torch.is_grad_enabled() else 0.7\nx = x * s"),
    mode("detach", "x = x + 0.5 * torch.tanh(x).detach()"),
    mode("detach_", "h = torch.tanh(x)\nh.detach_()\nx = x + h"),
    mode("straight through", "x = x + (x.round() - x).detach()"),
    mode("a clamp straight through", "x = x + (x.clamp(-0.3, 0.3) - x).detach()"),
    mode("data", "x = x + 0.5 * torch.tanh(x).data"),
    mode("requires_grad_ of what is detached", "h = x.detach().requires_grad_()\nx = x + torch.tanh(h)"),
    mode("a new leaf", "h = torch.ones(3, requires_grad=True)\nx = x * h"),
    mode("a checkpoint", "x = checkpoint(torch.tanh, x, use_reentrant=False)"),
    mode("a checkpoint of a layer", "x = checkpoint(self.lin_N, x, use_reentrant=False)", init="self.lin_N = nn.Linear(3, 3)", changes=("own.lin_N.requires_grad_(False)",)),
    mode("a checkpoint of old", "x = checkpoint(lambda h: torch.tanh(self.lin_N(h)), x, use_reentrant=True)", init="self.lin_N = nn.Linear(3, 3)"),
    mode("a checkpoint that asks", "def inner(x):\n    return torch.tanh(x) if torch.is_grad_enabled() else torch.sin(x)\nx = checkpoint(inner, x, use_reentrant=False)"),
    mode("a checkpoint with no_grad within", "def inner(x):\n    with torch.no_grad():\n        s = x.mean(0)\n    return torch.tanh(x) - s\nx = checkpoint(inner, x, use_reentrant=False)"),
    mode("torch.autograd.grad", "with torch.enable_grad():\n    h = x if x.requires_grad else x.detach().requires_grad_()\n    (g,) = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)\nx = x + 0.5 * g"),
    mode("torch.func.grad", "x = x + torch.func.grad(lambda h: h.tanh().sum())(x)"),
    mode("torch.func.vmap", "x = torch.func.vmap(torch.sin)(x)"),
    mode("saved_tensors_hooks", "with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.0, lambda t: t):\n    x = torch.tanh(x)"),
    mode("save_on_cpu", "with torch.autograd.graph.save_on_cpu():\n    x = torch.tanh(x)"),
    mode("autocast that is off", "with torch.autocast('cpu', enabled=False):\n    x = torch.tanh(x)"),
    mode("by the mode", "x = torch.tanh(x) if self.training else torch.sin(x)", changes=("own.eval()", "own.training = False")),
    mode("frozen within", "self.w_N.requires_grad_(False)\nx = x * self.w_N", init="self.w_N = nn.Parameter(torch.rand(3))"),
    mode("a weight's data", "x = x * self.w_N.data", init="self.w_N = nn.Parameter(torch.rand(3))"),
    mode("a weight detached", "x = x * self.w_N.detach() + self.w_N", init="self.w_N = nn.Parameter(torch.rand(3))"),
    mode("a normalised weight", "with torch.no_grad():\n    n = self.w_N.norm()\nx = x * self.w_N / n", init="self.w_N = nn.Parameter(torch.rand(3))"),
]  # fmt: skip
