"""What is refused, on one mesh or on all, and in which words."""

REFUSED: dict[tuple[str, str], str] = {
    # masks of attention whose sizes are lengths of the batch
    ("transformers speecht5", "all"): r"modeling_speecht5.py:\d+ in _make_guided_attention_masks",
    # random numbers of another library
    ("transformers bigbird block sparse", "all"): "the forward calls numpy.random.permutation while it is captured",
    # all weights within spectral norms, whose values are computed whole
    ("ideas discriminator", "tp"): "tensor_parallel: no weight can be sharded on axis 'tp' of size 2: net.0.weight_",
}
