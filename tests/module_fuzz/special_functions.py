"""A: custom autograd Functions of more arguments or results, and others that are under one name only."""

from __future__ import annotations

from tests.module_fuzz.piece import Piece

SPECIAL_PIECES = [
    Piece(
        "a Function of three arguments",
        "A",
        "x = f_N(x, self.w_N, 0.5)",
        """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x, w, k):
                ctx.save_for_backward(x, w)
                ctx.k = k
                return x * w * k
            @staticmethod
            def backward(ctx, g):
                x, w = ctx.saved_tensors
                return g * w, (g * x).sum(0) * ctx.k * 2, None
        f_N = Fn_N.apply
        """,
        "self.w_N = nn.Parameter(torch.rand(3))",
        ("own.w_N.requires_grad_(False)",),
    ),
    Piece(
        "a Function of two results",
        "A",
        "x, y = f_N(x)\nx = x + 0.5 * y",
        """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin(), x.cos()
            @staticmethod
            def backward(ctx, g, h):
                return g + 0.5 * h
        f_N = Fn_N.apply
        """,
    ),
    Piece(
        "a result that is not differentiable",
        "A",
        "x, sign = f_N(x)\nx = x + 0.1 * sign",
        """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                sign = x.sign()
                ctx.mark_non_differentiable(sign)
                return x * 0.5, sign
            @staticmethod
            def backward(ctx, g, _):
                return g * 0.3
        f_N = Fn_N.apply
        """,
    ),
    Piece(
        "a backward that reads a global",
        "AD",
        "x = f_N(x)",
        """
        scale_N = 0.5
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.0
            @staticmethod
            def backward(ctx, g):
                return g * scale_N
        f_N = Fn_N.apply
        """,
        changes=("mod.scale_N = 2.0",),
    ),
    Piece(
        "a backward that is replaced",
        "AD",
        "x = f_N(x)",
        """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.0
            @staticmethod
            def backward(ctx, g):
                return g * 0.5
        f_N = Fn_N.apply
        """,
        changes=("mod.Fn_N.backward = staticmethod(lambda ctx, g: g * 2)",),
    ),
    Piece(
        "an argument written in place",
        "A",
        "x = f_N(x * 1.0)",
        """
        class Fn_N(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.mark_dirty(x)
                return x.mul_(0.5)
            @staticmethod
            def backward(ctx, g):
                return g * 0.25
        f_N = Fn_N.apply
        """,
    ),
    Piece(
        "a Function with a rule for vmap",
        "A",
        "x = f_N(x)",
        """
        class Fn_N(Function):
            generate_vmap_rule = True
            @staticmethod
            def forward(x):
                return x.clamp(-0.4, 0.4)
            @staticmethod
            def setup_context(ctx, inputs, output):
                pass
            @staticmethod
            def backward(ctx, g):
                return g * 0.8
        f_N = Fn_N.apply
        """,
    ),
    Piece(
        "a Function made in a function",
        "A",
        "x = f_N(x)",
        """
        def made_N(k):
            class Fn(Function):
                @staticmethod
                def forward(ctx, x):
                    return x * k
                @staticmethod
                def backward(ctx, g):
                    return g * k * 3
            return Fn.apply
        f_N = made_N(0.5)
        """,
        changes=("mod.f_N = mod.made_N(0.25)",),
    ),
]
