"""`flex_attention` and `varlen_attn` in a model: their masks are read as arguments of `autopar::attention`.

expressions        a mask or score function as an expression of positions, by calling it once
mask_arguments     the arguments that say the same: causal, window, chunk, documents, padding; the rest as a bias
stand_ins          what `flex_attention`, `create_block_mask` and `varlen_attn` do while a model is captured
"""
