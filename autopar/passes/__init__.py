"""The passes: graph rewrites that carry out the plan and decide nothing. In processing order (`in_order` lists them):

normalize, expand_kv_heads                               the captured graph in one spelling
split_biases, place_token_slices, propagate_placements (place_backwards), slice_early      placements and conversions
localize_shapes                                          the pieces of one rank
split_prologue, split_rounds, slice_tokens, slice_sizes, cut_stages    what runs once, ahead, per token slice, per part
differentiate (joint, trace_joint, reverse, derivatives), accumulate_gradients, parameter_graphs     step graphs
simplify_views, simplify_arithmetic, prefetch_gathers, join_sums, bucket_gathers, bucket_gradients, own_gradients tidied
attention                                                algorithms that run inside of an operator: no passes

Stands on rewrite, rules and steps; knows no decision's reason and no process group. `autopar.compile` imports it.
"""
