"""H: hooks of modules and weights, added and removed."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece

TWICE = "def twice_N(module, args, y):\n    return y * 2"
ACT = "self.act_N = nn.Tanh()"


def hook(
    name: str, init: str, changes: tuple[str, ...] = (), top: str = TWICE, forward: str = "x = self.act_N(x)"
) -> Piece:
    return Piece(name, "H", forward, top, f"{ACT}\n{init}", changes)


HOOK_PIECES = [
    hook("a forward hook", "self.act_N.register_forward_hook(twice_N)", ("own.act_N._forward_hooks.clear()",)),
    hook("a forward hook that reads", "self.act_N.register_forward_hook(lambda m, a, y: None)"),
    hook("a pre-hook", "self.act_N.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))"),
    hook("a hook with keywords", "self.act_N.register_forward_hook(lambda m, a, k, y: y * 0.5, with_kwargs=True)"),
    hook("always_call", "self.act_N.register_forward_hook(twice_N, always_call=True)"),
    hook("hooks in order", "self.act_N.register_forward_hook(twice_N)\nself.act_N.register_forward_hook(lambda m, a, y: torch.sin(y), prepend=True)"),
    hook("a hook, its handle on the module", "self.h_N = self.act_N.register_forward_hook(twice_N)", ("own.h_N.remove()",)),
    hook("a hook, its handle in the file", "global h_N\nh_N = self.act_N.register_forward_hook(twice_N)", ("mod.h_N.remove()",)),
    hook("a hook, its handle in a list", "handles_N.append(self.act_N.register_forward_hook(twice_N))", ("mod.handles_N[0].remove()",), TWICE + "\nhandles_N = []"),
    hook("a hook that was removed", "self.act_N.register_forward_hook(twice_N).remove()"),
    hook("a hook to be added", "", ("own.act_N.register_forward_hook(mod.twice_N)", "own.act_N.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))", "own.act_N.register_forward_hook(mod.twice_N).remove()", "mod.h_N = own.act_N.register_forward_hook(mod.twice_N)\nlog('hooks', len(own.act_N._forward_hooks))")),
    hook("a hook that reads a global", "self.act_N.register_forward_hook(lambda m, a, y: y * k_N)", ("mod.k_N = 1.5",), "k_N = 0.5"),
    hook("a hook of a bound method", "self.act_N.register_forward_hook(s_N.hook)", ("mod.s_N.k = 1.5",), "class Scale_N:\n    k = 0.5\n    def hook(self, m, a, y):\n        return y * self.k\ns_N = Scale_N()"),
    hook("a hook of a method of the model", "self.k_N = 0.5\ndef hook(m, a, y):\n    return y * self.k_N\nself.act_N.register_forward_hook(hook)", ("own.k_N = 1.5",)),
    hook("a hook with a weight of its own", "self.w_N = nn.Parameter(torch.rand(3))\nself.act_N.register_forward_hook(lambda m, a, y: y * self.w_N)", ("own.w_N.requires_grad_(False)",)),
    hook("a hook that keeps the result", "self.kept_N = {}\nself.act_N.register_forward_hook(lambda m, a, y: self.kept_N.update(y=y))", forward="x = self.act_N(x)\nx = x + self.kept_N['y']"),
    hook("a hook that keeps a mean in a buffer", "self.register_buffer('m_N', torch.zeros(3))\nself.act_N.register_forward_hook(lambda m, a, y: (self.m_N.lerp_(y.detach().mean(0), 0.1), None)[1])", ("log('m', own.m_N)", "own.m_N.fill_(1)"), forward="x = self.act_N(x) - self.m_N"),
    hook("a full backward hook", "self.act_N.register_full_backward_hook(lambda m, g, h: (g[0] * 0.5,))"),
    hook("a gradient hook in the forward", "", forward="x = self.act_N(x)\nif x.requires_grad:\n    x.register_hook(lambda g: g * 0.5)"),
    hook("a hook of a weight, later", "self.w_N = nn.Parameter(torch.rand(3))", ("own.w_N.register_hook(lambda g: g * 0.5)", "own.w_N.register_hook(lambda g: g * 0.5).remove()", "own.w_N.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5), None][1])"), forward="x = self.act_N(x) * self.w_N"),
    hook("a hook for all modules", "", ("mod.h_N = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 0.5 if isinstance(m, nn.Tanh) else None)\nmod.h_N.remove()",)),
]  # fmt: skip
