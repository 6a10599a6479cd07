"""P: plain layers and weights, so that the others have company."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece

FROZEN = ("own.lin_N.requires_grad_(False)", "own.lin_N.weight.requires_grad_(False)", "own.lin_N.bias = None")


def layer(name: str, forward: str, init: str = "", changes: tuple[str, ...] = (), top: str = "") -> Piece:
    return Piece(name, "P", forward, top, init, changes)


LAYER_PIECES = [
    layer("linear", "x = torch.tanh(self.lin_N(x))", "self.lin_N = nn.Linear(3, 3)", FROZEN),
    layer("a scale", "x = x * self.w_N", "self.w_N = nn.Parameter(torch.rand(3) + 0.5)", ("own.w_N.requires_grad_(False)", "with torch.no_grad():\n    own.w_N.mul_(0.5)", "own.w_N.data.add_(0.1)", "own.w_N.grad = None", "log('w', own.w_N)")),
    layer("a tied scale", "x = torch.sin(x * self.w_N) * self.v_N", "self.w_N = nn.Parameter(torch.rand(3) + 0.5)\nself.v_N = self.w_N", ("own.w_N.requires_grad_(False)",)),
    layer("an unused weight", "x = torch.tanh(x)", "self.w_N = nn.Parameter(torch.rand(3))", ("own.w_N.requires_grad_(False)",)),
    layer("a frozen weight", "x = x * self.w_N", "self.w_N = nn.Parameter(torch.rand(3), requires_grad=False)", ("own.w_N.requires_grad_(True)",)),
    layer("layer norm", "x = self.norm_N(x)", "self.norm_N = nn.LayerNorm(3)", ("own.norm_N.eps = 0.1", "own.norm_N.weight.requires_grad_(False)")),
    layer("residual mlp", "x = x + self.down_N(torch.relu(self.up_N(x)))", "self.up_N, self.down_N = nn.Linear(3, 4), nn.Linear(4, 3)", ("own.up_N.requires_grad_(False)",)),
    layer("activations", "x = F.silu(x) + 0.1 * torch.cos(x)"),
    layer("a normalised row", "x = F.normalize(x, dim=-1)"),
    layer("softmax", "x = x * x.softmax(-1)"),
    layer("in place", "x = torch.sin(x)\nx.mul_(0.5).add_(0.1)"),
    layer("views", "a, b = x[:, :1], x[:, 1:]\nx = torch.cat([b, a], 1)"),
    layer("where", "x = torch.where(x > 0, x, 0.1 * x)"),
    layer("weight norm", "x = self.lin_N(x)", "self.lin_N = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))"),
    layer("a parametrization", "x = self.lin_N(x)", "self.lin_N = nn.Linear(3, 3)\nparametrize.register_parametrization(self.lin_N, 'weight', Half_N())", ("own.lin_N.parametrizations.weight.original.requires_grad_(False)",), "class Half_N(nn.Module):\n    def forward(self, w):\n        return w * 0.5"),
    layer("weights in a list", "for w in self.ws_N:\n    x = torch.sin(x * w)", "self.ws_N = nn.ParameterList([torch.rand(3), torch.rand(3)])", ("own.ws_N[0].requires_grad_(False)",)),
    layer("functional_call", "x = torch.func.functional_call(self.lin_N, {'weight': self.lin_N.weight * 0.5}, (x,))", "self.lin_N = nn.Linear(3, 3)"),
    layer("further outputs", "out['mean_N'] = x.mean()\nout['row_N'] = x.detach()[0]"),
    layer("nested outputs", "out['more_N'] = {'a': [x.detach() * 2], 'k': 3}"),
]  # fmt: skip

# Events of the whole model.
GENERAL = (
    "net.eval()",
    "net.train()",
    "net.w.requires_grad_(False)",
    "net.w.requires_grad_(True)",
    "net.requires_grad_(False)\nnet.w.requires_grad_(True)",
    "with torch.no_grad():\n    for p in net.parameters():\n        p.mul_(0.9)",
    "net.w.data.mul_(0.9)",
    "net.load_state_dict(net.state_dict())",
    "net.note = 1",
    "net.zero_grad(set_to_none=False)",
    "side.optimizer.param_groups[0]['lr'] = 0.01",
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "log('names', [name for name, _ in net.named_parameters()])",
    "log('buffers', [name for name, _ in net.named_buffers()])",
    "log('frozen', [p.requires_grad for p in net.parameters()])",
    "net.w.register_hook(lambda g: g * 0.5)",
    "net.apply(lambda module: None)",
    "net.double()",
    "mod.Net.extra = 3",
)
