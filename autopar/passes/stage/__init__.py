"""Stage: graphs of one pipeline stage.

split_stages            a local graph becomes one graph per stage
chunk_losses            the loss in chunks of tokens
tile_regions, tile_tokens   what computes every token by itself, in tiles of tokens
split_prologue, split_statistics     work that all microbatches share, hoisted out of the microbatch loop
slice_tokens, slice_sizes            graphs of a token slice
cut_experts, cut_mlps                experts, or MLPs, that the ranks of another role compute
parameter_graphs, accumulate_gradients     parameters gathered and gradients reduced once per step

Imports rewrite and steps; `compile` calls these in order.
"""
