"""Generation from a captured graph: requests, their cache of keys and values, and the choice of tokens.

sampling_params     what a request asks for: `autopar.Sampling`
requests            one request's state
step                what a step computes, what it chose, and how it is sent
pages, paged_cache  which pages are free, and which prefixes of requests they hold
scheduler           what the next step computes
control, loop       messages between ranks, and what drives their steps
calls, ticket       calls of ranks, and what a caller holds of a request
server, metrics     `Server`
choice              from rows of logits to tokens
generation_config   transformers' GenerationConfig as `Sampling`
generate            transformers' `generate` and `generate_batch` on requests
text                tokens to text as they come, and stop strings
"""
