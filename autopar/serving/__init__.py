"""Generation from a captured graph: requests, their cache of keys and values, and the choice of tokens.

sampling_params     what a request asks for: `autopar.Sampling`
step                what a step computes, and what it chose
choice              from rows of logits to tokens
generate            transformers' `generate` and `generate_batch` on requests
text                tokens to text as they come, and stop strings
"""
