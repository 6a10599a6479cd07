"""A: custom autograd Functions, and the names by which a forward reaches them: each Function under each name."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece, lines

# The class Fn_N: one argument, one result.
FUNCTIONS = {
    "a clip that saves its input": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clamp(-0.5, 0.5)
            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return g * (x.abs() < 1.0) * 0.5
        """,
    "straight-through rounding": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                return torch.round(x * 4) / 4
            @staticmethod
            def backward(ctx, g):
                return g
        """,
    "a backward with setup_context": """
        class Fn_N(Function):
            @staticmethod
            def forward(x):
                return torch.tanh(x)
            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(output)
            @staticmethod
            def backward(ctx, g):
                (y,) = ctx.saved_tensors
                return g * (1 - y * y) * 0.5
        """,
    "a gradient that is reversed": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x, k=0.3):
                ctx.k = k
                return x.view_as(x)
            @staticmethod
            def backward(ctx, g):
                return -ctx.k * g, None
        """,
    "a gradient that is clipped": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.shape = x.shape
                return x * 1.5
            @staticmethod
            def backward(ctx, g):
                return g.clamp(-0.01, 0.01).reshape(ctx.shape)
        """,
    "a method of a base class": """
        class Base_N(Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin()
            @staticmethod
            def backward(ctx, g):
                return g * 0.1
        class Fn_N(Base_N):
            @staticmethod
            def backward(ctx, g):
                return Base_N.backward(ctx, g) + 0.2 * g
        """,
    "a backward that asks what is needed": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                return x.exp() * 0.3
            @staticmethod
            @once_differentiable
            def backward(ctx, g):
                return g * 0.7 if ctx.needs_input_grad[0] else None
        """,
    "two saved, one made": """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                s = x.sigmoid()
                ctx.save_for_backward(x, s)
                return x * s
            @staticmethod
            def backward(ctx, g):
                x, s = ctx.saved_tensors
                return g * s * 0.9 + 0 * x
        """,
}

# How a forward reaches it: forward, top, init, changes.
NAMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "Fn.apply": ("x = Fn_N.apply(x)", "", "", ()),
    "a global": ("x = f_N(x)", "f_N = Fn_N.apply", "", ("mod.f_N = torch.tanh",)),
    "another name of the class": ("x = Same_N.apply(x)", "Same_N = Fn_N", "", ()),
    "a local": ("f_N = Fn_N.apply\nx = f_N(x)", "", "", ()),
    "a closure": (
        "x = f_N(x)",
        """
        def make_N():
            apply = Fn_N.apply
            def call(x):
                return apply(x)
            return call
        f_N = make_N()
        """,
        "",
        (),
    ),
    "a closure on the module": (
        "x = self.f_N(x)",
        """
        def make_N(k):
            apply = Fn_N.apply
            return lambda x: apply(x) * k
        """,
        "self.f_N = make_N(0.5)",
        ("own.f_N = mod.make_N(2.0)",),
    ),
    "an attribute": ("x = self.f_N(x)", "", "self.f_N = Fn_N.apply", ("own.f_N = torch.tanh",)),
    "an attribute of the class": (
        "x = self.act_N(x)",
        """
        class Act_N(nn.Module):
            f = Fn_N.apply
            def forward(self, x):
                return self.f(x)
        """,
        "self.act_N = Act_N()",
        ("mod.Act_N.f = staticmethod(torch.tanh)",),
    ),
    "a static method": (
        "x = Holder_N.f(x)",
        """
        class Holder_N:
            f = staticmethod(Fn_N.apply)
        """,
        "",
        ("mod.Holder_N.f = staticmethod(torch.tanh)",),
    ),
    "a dict": ("x = fs_N['f'](x)", "fs_N = {'f': Fn_N.apply}", "", ("mod.fs_N['f'] = torch.tanh",)),
    "a list on the module": (
        "for f in self.fs_N:\n    x = f(x)",
        "",
        "self.fs_N = [Fn_N.apply, torch.tanh]",
        ("own.fs_N.pop()", "own.fs_N.reverse()"),
    ),
    "a default": ("x = call_N(x)", "def call_N(x, f=Fn_N.apply):\n    return f(x)", "", ()),
    "a default by keyword": ("x = call_N(x)", "def call_N(x, *, f=Fn_N.apply):\n    return f(x)", "", ()),
    "a partial": ("x = f_N(x)", "f_N = functools.partial(Fn_N.apply)", "", ()),
    "a partial on the module": ("x = self.f_N(x)", "", "self.f_N = functools.partial(Fn_N.apply)", ()),
    "a partial of a function that calls it": (
        "x = f_N(x)",
        "def call_N(f, x):\n    return f(x)\nf_N = functools.partial(call_N, Fn_N.apply)",
        "",
        (),
    ),
    "a lambda": ("x = self.f_N(x)", "", "self.f_N = lambda x: Fn_N.apply(x)", ()),
    "an object": ("x = ops_N.f(x)", "ops_N = types.SimpleNamespace(f=Fn_N.apply)", "", ("mod.ops_N.f = torch.tanh",)),
    "a dataclass": (
        "x = self.ops_N.f(x)",
        "@dataclasses.dataclass\nclass Ops_N:\n    f: typing.Any = Fn_N.apply",
        "self.ops_N = Ops_N()",
        ("own.ops_N.f = torch.tanh",),
    ),
    "an attribute of a function": ("x = call_N.f(x)", "def call_N(): ...\ncall_N.f = Fn_N.apply", "", ()),
    "a forward hook": (
        "x = self.act_N(x)",
        "f_N = Fn_N.apply\ndef hook_N(module, args, out):\n    return f_N(out)",
        "self.act_N = nn.Identity()\nself.act_N.register_forward_hook(hook_N)",
        ("own.act_N._forward_hooks.clear()",),
    ),
    "a forward pre-hook": (
        "x = self.act_N(x)",
        "f_N = Fn_N.apply",
        "self.act_N = nn.Tanh()\nself.act_N.register_forward_pre_hook(lambda module, args: (f_N(args[0]),))",
        (),
    ),
    "a parametrization": (
        "x = self.lin_N(x)",
        "f_N = Fn_N.apply\nclass Par_N(nn.Module):\n    def forward(self, w):\n        return f_N(w)",
        "self.lin_N = nn.Linear(3, 3)\nparametrize.register_parametrization(self.lin_N, 'weight', Par_N())",
        (),
    ),
    "a checkpoint": ("x = checkpoint(f_N, x, use_reentrant=False)", "f_N = Fn_N.apply", "", ()),
    "map": ("(x,) = map(f_N, [x])", "f_N = Fn_N.apply", "", ()),
    "attrgetter": ("x = operator.attrgetter('apply')(Fn_N)(x)", "", "", ()),
    "a cached getter": ("x = get_N()(x)", "@functools.cache\ndef get_N():\n    return Fn_N.apply", "", ()),
    "a wrapper": (
        "x = f_N(x)",
        """
        def wrapped_N(f):
            @functools.wraps(f)
            def call(*args):
                return f(*args)
            return call
        f_N = wrapped_N(Fn_N.apply)
        """,
        "",
        (),
    ),
    "sys.modules": ("x = getattr(sys.modules[__name__], 'Fn_N').apply(x)", "", "", ()),
    "globals()": ("x = globals()['f_N'](x)", "f_N = Fn_N.apply", "", ("mod.f_N = torch.tanh",)),
    "a branch on the mode": (
        "x = (f_N if self.training else torch.tanh)(x)",
        "f_N = Fn_N.apply",
        "",
        ("own.training = False",),
    ),
    "a module of a function": (
        "x = self.seq_N(x)",
        """
        class Lambda_N(nn.Module):
            def __init__(self, f):
                super().__init__()
                self.f = f
            def forward(self, x):
                return self.f(x)
        """,
        "self.seq_N = nn.Sequential(Lambda_N(Fn_N.apply), nn.Tanh())",
        ("own.seq_N[0].f = torch.sin",),
    ),
    "a context variable": ("x = f_N.get()(x)", "f_N = contextvars.ContextVar('f', default=Fn_N.apply)", "", ()),
    "a method's own name for it": (
        "x = self.helper_N.call(x)",
        """
        class Helper_N:
            def __init__(self):
                self.apply = Fn_N.apply
            def call(self, x):
                return self.apply(x) * 0.9
        """,
        "self.helper_N = Helper_N()",
        (),
    ),
    "a function put into torch's place": ("x = torch.nn.functional.hardtanh(x)", "F.hardtanh = Fn_N.apply", "", ()),
    "a nested function": ("def inner(x):\n    return Fn_N.apply(x)\nx = inner(x)", "", "", ()),
    "a comprehension": ("x = sum([f_N(p) for p in x.split(1)] and [f_N(x)])", "f_N = Fn_N.apply", "", ()),
    "a weight": (
        "x = x * f_N(self.w_N)",
        "f_N = Fn_N.apply",
        "self.w_N = nn.Parameter(torch.rand(3))",
        ("own.w_N.requires_grad_(False)",),
    ),
    "what needs no gradient": ("x = x + f_N(x.detach())", "f_N = Fn_N.apply", "", ()),
    "a buffer": ("x = x + f_N(self.b_N)", "f_N = Fn_N.apply", "self.register_buffer('b_N', torch.rand(3))", ()),
    "no_grad": ("with torch.no_grad():\n    h = f_N(x)\nx = x + h", "f_N = Fn_N.apply", "", ()),
    "a branch of no gradient": ("x = f_N(x) + 0.1 * f_N(x).detach()", "f_N = Fn_N.apply", "", ()),
    "twice": ("x = f_N(torch.sin(f_N(x)))", "f_N = Fn_N.apply", "", ()),
}

FUNCTION_PIECES = [
    Piece(f"{function}, by {name}", "AD" if changes else "A", forward, lines(FUNCTIONS[function], top), init, changes)
    for function in FUNCTIONS
    for name, (forward, top, init, changes) in NAMES.items()
]
