"""B: buffers that a forward uses, and updates in place or by assigning, before or after."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece

VECTOR = "self.register_buffer('m_N', torch.zeros(3))"
# What users do to a buffer between steps; the last two look at it.
TOUCHED = (
    "own.m_N.fill_(0.3)",
    "own.m_N = torch.full((3,), 0.2)",
    "own.m_N.data = torch.full((3,), 0.1)",
    "own._buffers['m_N'] = torch.full((3,), 0.4)",
    "kept.append(own.m_N)",
    "log('m_N', own.m_N)",
    "own.load_state_dict({'m_N': torch.full((3,), 0.6)}, strict=False)",
)
NO_GRAD = "with torch.no_grad():\n    "


def vector(name: str, forward: str, changes: tuple[str, ...] = TOUCHED, top: str = "", init: str = VECTOR) -> Piece:
    return Piece(name, "B", forward, top, init, changes)


BUFFER_PIECES = [
    # --- updated in place
    vector("used, then updated in place", "x = x + self.m_N\n" + NO_GRAD + "self.m_N.mul_(0.9).add_(x.mean(0), alpha=0.1)"),
    vector("updated in place, then used", NO_GRAD + "self.m_N.lerp_(x.mean(0), 0.1)\nx = x - self.m_N"),
    vector("a clone used, then updated", "x = x * (1 + self.m_N.clone())\nself.m_N.add_(0.1 * x.detach().mean(0))"),
    vector("used before and after", "x = x + self.m_N\nself.m_N.add_(0.1)\nx = x + 0.5 * self.m_N"),
    vector("updated twice", "self.m_N.add_(0.1)\nx = x + self.m_N\nself.m_N.mul_(0.5)\nx = x - 0.3 * self.m_N"),
    vector("copy_", "x = x + self.m_N\nself.m_N.copy_(x.detach().amax(0) * 0.1)"),
    vector("one element", "x = x + self.m_N\nself.m_N[1] = 0.3\nself.m_N[0] += 0.1"),
    vector("a view of it", "v = self.m_N[:2]\nv.add_(0.1)\nx = x + self.m_N"),
    vector("its data", "self.m_N.data.add_(0.1 * x.detach().mean(0))\nx = x + self.m_N"),
    vector("zero_ and add_", "x = x + self.m_N\nself.m_N.zero_().add_(x.detach().mean(0))"),
    vector("torch.add(out=)", "torch.add(self.m_N, x.detach().mean(0), alpha=0.1, out=self.m_N)\nx = x + self.m_N"),
    vector("index_copy_", "self.m_N.index_copy_(0, torch.tensor([1]), x.detach().mean()[None])\nx = x + 0.1 * self.m_N"),
    vector("in training only", "if self.training:\n    self.m_N.add_(0.1)\nx = x + self.m_N"),
    vector("where a gradient is asked for", "if torch.is_grad_enabled():\n    self.m_N.add_(0.1)\nx = x + self.m_N"),
    vector("detached, then updated", "old = self.m_N.detach()\nself.m_N.add_(0.1)\nx = x + old"),
    vector("of a weight", NO_GRAD + "self.m_N.lerp_(self.w_N, 0.5)\nx = x * self.w_N + self.m_N", init=VECTOR + "\nself.w_N = nn.Parameter(torch.rand(3))"),
    vector("foreach", "torch._foreach_add_([self.m_N, self.k_N], 0.1)\nx = x + self.m_N * self.k_N.clone()", init=VECTOR + "\nself.register_buffer('k_N', torch.ones(3))"),
    # --- assigned
    vector("used, then assigned", "x = x * (1 + self.m_N)\nself.m_N = 0.9 * self.m_N + 0.1 * x.detach().mean(0)"),
    vector("assigned, then used", "self.m_N = 0.9 * self.m_N + 0.1 * x.detach().mean(0)\nx = x * (1 + self.m_N)"),
    vector("assigned through _buffers", "x = x * (1 + self.m_N)\nself._buffers['m_N'] = self.m_N + 0.1"),
    vector("setattr", "x = x * (1 + getattr(self, 'm_N'))\nsetattr(self, 'm_N', self.m_N + 0.1)"),
    vector("+= of the attribute", "x = x + self.m_N\nself.m_N += 0.1"),
    vector("register_buffer again", "x = x * (1 + self.m_N)\nself.register_buffer('m_N', self.m_N + 0.1)"),
    vector("assigned, its old value used", "old = self.m_N\nself.m_N = old + 0.1\nx = x * (1 + old) + self.m_N"),
    vector("assigned in training only", "if self.training:\n    self.m_N = self.m_N + 0.1\nx = x * (1 + self.m_N)"),
    # --- counters, queues, scales
    Piece("a counter", "B", "self.n_N += 1\nx = x * (1 + 0.1 * self.n_N)", "", "self.register_buffer('n_N', torch.zeros(()))", ("own.n_N.zero_()", "own.n_N = torch.ones(())", "log('n', float(own.n_N))")),
    Piece("a counter, by one element", "B", "x = x / (1 + self.n_N[0])\nself.n_N[0] = self.n_N[0] + 1", "", "self.register_buffer('n_N', torch.zeros(1))", ("own.n_N.zero_()", "kept.append(own.n_N)")),
    Piece("an integer counter", "B", "x = x * (1 + 0.1 * self.n_N.clone())\nself.n_N.add_(1)", "", "self.register_buffer('n_N', torch.tensor(0))", ("own.n_N.zero_()", "log('n', int(own.n_N))", "own.n_N += 2")),
    Piece("a counter's power", "B", "self.n_N = self.n_N + 1\nself.m_N.lerp_(x.detach().mean(0), 0.1)\nx = x - self.m_N / (1 - 0.9**self.n_N)", "", VECTOR + "\nself.register_buffer('n_N', torch.tensor(0))", ("own.n_N.zero_()", "own.m_N.zero_()")),
    Piece("a queue by cat", "B", "x = x + self.q_N.mean(0)\nself.q_N = torch.cat([self.q_N[1:], x.detach().mean(0, keepdim=True)])", "", "self.register_buffer('q_N', torch.zeros(4, 3))", ("own.q_N.zero_()", "log('q', own.q_N)", "kept.append(own.q_N)")),
    Piece("a queue by roll", "B", "self.q_N = self.q_N.roll(1, 0)\nself.q_N[0] = x.detach().mean(0)\nx = x + self.q_N.mean(0)", "", "self.register_buffer('q_N', torch.zeros(4, 3))", ("own.q_N.zero_()",)),
    Piece("a queue with a pointer", "B", "self.q_N[self.i_N] = x.detach().mean(0)\nself.i_N = (self.i_N + 1) % 4\nx = x + self.q_N.mean(0)", "", "self.register_buffer('q_N', torch.zeros(4, 3))\nself.register_buffer('i_N', torch.tensor(0))", ("own.i_N.zero_()", "log('i', own.i_N)")),
    Piece("a scale of moving averages", "B", "if self.training:\n    self.s_N = 0.9 * self.s_N + 0.1 * x.detach().abs().mean()\nx = x / self.s_N", "", "self.register_buffer('s_N', torch.ones(()))", ("own.s_N.fill_(2)", "kept.append(own.s_N)", "own.eval()")),
    Piece("a running maximum", "B", "torch.maximum(self.s_N, x.detach().abs().amax(), out=self.s_N)\nx = x / self.s_N.clone()", "", "self.register_buffer('s_N', torch.ones(()))", ("own.s_N.fill_(2)",)),
    Piece("a fake quantisation", "B", "self.s_N.mul_(0.9).add_(0.1 * x.detach().abs().amax())\ns = self.s_N.clone() / 8\nx = x + ((x / s).round() * s - x).detach()", "", "self.register_buffer('s_N', torch.ones(()))", ("own.s_N.fill_(2)",)),
    # --- what becomes of it
    vector("returned", "self.m_N.add_(0.1)\nx = x + self.m_N\nout['m_N'] = self.m_N"),
    vector("returned before its update", "out['m_N'] = self.m_N.clone()\nself.m_N.add_(x.detach().mean(0))\nx = x + self.m_N"),
    vector("returned, then updated", "out['m_N'] = self.m_N\nself.m_N.add_(x.detach().mean(0))\nx = x + self.m_N"),
    vector("a view of it returned", "self.m_N.add_(0.1)\nout['m_N'] = self.m_N[:2]\nx = x + self.m_N"),
    vector("assigned and returned", "self.m_N = self.m_N + 0.1\nx = x + self.m_N\nout['m_N'] = self.m_N"),
    vector("assigned what is returned of x", "self.m_N = x.detach().mean(0)\nout['m_N'] = self.m_N\nx = x - 0.5 * self.m_N"),
    vector("a detached result kept as buffer", "x = torch.tanh(x)\nself.m_N.copy_(x.detach()[0])\nout['m_N'] = self.m_N + 1"),
    vector("unused, but updated", "self.m_N.add_(x.detach().mean(0))"),
    vector("only returned", "out['m_N'] = self.m_N"),
    # --- where it is
    vector("not persistent", "x = x + self.m_N\nself.m_N.add_(0.1)", init="self.register_buffer('m_N', torch.zeros(3), persistent=False)", changes=TOUCHED[:-1]),
    vector("of a submodule, by the parent", "x = x + self.sub_N.m\nself.sub_N.m.add_(0.1)", init="self.sub_N = nn.Module()\nself.sub_N.register_buffer('m', torch.zeros(3))", changes=("own.sub_N.m.zero_()", "own.sub_N.m = torch.ones(3)", "kept.append(own.sub_N.m)")),
    vector("shared by two modules", "self.m_N.add_(0.1)\nx = x + self.sub_N.m", init=VECTOR + "\nself.sub_N = nn.Module()\nself.sub_N.register_buffer('m', self.m_N)", changes=("own.m_N.zero_()", "own.sub_N.m.zero_()", "own.m_N = torch.ones(3)", "kept.append(own.sub_N.m)")),
    vector("a handle kept by the file", "x = x * (1 + self.m_N)", top="shared_N = torch.zeros(3)", init="self.register_buffer('m_N', shared_N)", changes=("mod.shared_N.fill_(0.5)", "mod.shared_N[0] = 2.0", *TOUCHED[:2])),
    vector("a handle kept, updated in the forward", "x = x + self.m_N\nself.m_N.add_(0.1)", top="shared_N = torch.zeros(3)", init="self.register_buffer('m_N', shared_N)", changes=("log('shared', mod.shared_N)", "mod.shared_N.zero_()")),
    vector("updated by a forward hook", "x = self.act_N(x) + self.m_N", init=VECTOR + "\nself.act_N = nn.Tanh()\nself.act_N.register_forward_hook(lambda module, args, y: (self.m_N.add_(0.1 * y.detach().mean(0)), None)[1])"),
    vector("updated by a method", "x = x + self.m_N\nself.note_N.update(x)", top="class Note_N:\n    def __init__(self, m):\n        self.m = m\n    def update(self, x):\n        self.m.add_(0.1 * x.detach().mean(0))", init=VECTOR + "\nself.note_N = Note_N(self.m_N)", changes=TOUCHED[:1]),
    vector("updated by a function", "x = x + self.m_N\nupdate_N(self.m_N, x)", top="@torch.no_grad()\ndef update_N(m, x):\n    m.mul_(0.9).add_(x.mean(0), alpha=0.1)"),
    vector("None at first", "if self.m_N is None:\n    x = x * 0.5\nelse:\n    x = x * self.m_N", init="self.register_buffer('m_N', None)", changes=("own.m_N = torch.full((3,), 0.7)", "own.m_N = None")),
    vector("a mask", "x = x * self.m_N", init="self.register_buffer('m_N', torch.tensor([True, False, True]))", changes=("own.m_N.logical_not_()", "own.m_N[0] = False")),
    vector("a mask that is updated", "x = torch.where(self.m_N, x, 0.1 * x)\nself.m_N = self.m_N.roll(1)", init="self.register_buffer('m_N', torch.tensor([True, False, True]))", changes=("own.m_N.logical_not_()", "kept.append(own.m_N)")),
    vector("inside no_grad of a checkpoint", "def inner(x):\n    return torch.sin(x) + self.m_N\nx = checkpoint(inner, x, use_reentrant=False)\nself.m_N = self.m_N + 0.1"),
    vector("in a buffer list", "for b in self.bs_N.buffers():\n    x = x + b\n    b.add_(0.1)", init="self.bs_N = nn.Module()\nself.bs_N.register_buffer('a', torch.zeros(3))\nself.bs_N.register_buffer('b', torch.ones(3))", changes=("own.bs_N.a.fill_(1)", "own.bs_N.b = torch.zeros(3)")),
    Piece("batch norm", "B", "x = self.bn_N(x)", "", "self.bn_N = nn.BatchNorm1d(3)", ("own.bn_N.eval()", "own.bn_N.running_mean.zero_()", "own.bn_N.momentum = 0.5", "own.bn_N.reset_running_stats()", "kept.append(own.bn_N.running_mean)", "own.bn_N.track_running_stats = False")),
    Piece("batch norm without weights", "B", "x = self.bn_N(x)", "", "self.bn_N = nn.BatchNorm1d(3, affine=False)", ("own.bn_N.eval()", "own.bn_N.running_var.fill_(2)")),
    Piece("a spectral norm", "B", "x = self.lin_N(x)", "", "self.lin_N = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))", ("own.lin_N.eval()",)),
    Piece("a plain tensor kept beside", "B", "x = x + self.t_N\nself.t_N = self.t_N + 0.1", "", "self.t_N = torch.zeros(3)", ("own.t_N = torch.ones(3)", "log('t', own.t_N)")),
    Piece("a plain tensor updated in place", "B", "x = x + self.t_N\nself.t_N.add_(0.1)", "", "self.t_N = torch.zeros(3)", ("own.t_N.fill_(1)", "log('t', own.t_N)")),
    Piece("a Python counter", "B", "self.calls_N += 1\nx = x * (1 + 0.1 * self.calls_N)", "", "self.calls_N = 0", ("own.calls_N = 0", "log('calls', own.calls_N)")),
    Piece("the last value in a list", "B", "out['past_N'] = sum(self.past_N)\nself.past_N.append(x.detach().mean())\ndel self.past_N[:-3]", "", "self.past_N = [torch.zeros(())]", ("log('past', len(own.past_N))",)),
]  # fmt: skip
