"""What is refused, on one mesh or on all, and in which words."""

REFUSED: dict[tuple[str, str], str] = {
    # numbers that the graph would have to know
    (
        "transformers qwen2-vl",
        "all",
    ): r"modeling_qwen2_vl.py:\d+ in .*lengths.tolist\(\).* branches on a tensor's value",
    ("transformers longformer", "all"): r"`if is_global_attn:`.* branches on a tensor's value",
    ("transformers led", "all"): r"`if is_global_attn:`.* branches on a tensor's value",
    ("transformers detr", "all"): r"`if not torch.isfinite\(hidden_states\).all\(\):`.* branches on a tensor's value",
    ("transformers mask2former", "all"): r"`if not torch.isfinite\(hidden_states\).all\(\):`.* branches on a tensor's",
    ("transformers wav2vec2", "all"): r"`if labels is not None and labels.max\(\) .*branches on a tensor's value",
    ("transformers hubert", "all"): r"`if labels is not None and labels.max\(\) .*branches on a tensor's value",
    ("transformers informer", "all"): r"time_series_utils.py:\d+ .* branches on a tensor's value",
    ("transformers time series transformer", "all"): r"time_series_utils.py:\d+ .* branches on a tensor's value",
    # sizes that depend on values
    ("transformers speecht5", "all"): r"modeling_speecht5.py:\d+ in forward, `l1_loss = .*",
    # random numbers
    ("transformers bigbird block sparse", "all"): r"the forward calls numpy.random.permutation while it is captured",
    ("diffusers DiT", "all"): r"random numbers must not depend on how the graph is cut, found aten.rand.default",
    ("timm drop path", "all"): r"aten::bernoulli\(\) is missing value",
    # other things of the forward
    ("transformers switch transformers", "all"): r"`self.classifier = self.classifier.to\(self.dtype\)`",
    ("transformers nllb moe", "all"): r"`self.classifier = self.classifier.to\(self.dtype\)`",
    ("plain PINN", "all"): r"torch.autograd.grad and backward cannot be captured in a forward \(a gradient penalty\)",
    # attention over heads that are mixed before the softmax
    ("x-transformers memory and talking heads", "cp"): r"context_parallel: axis \"cp\" cuts the sequence of attention",
}
