"""Data-dependent branches and indices, resolved while the model is traced.

data_dependent_branches     branches that mean the same whichever way they go, or only raise
known_values                values that no input and no parameter takes part in
mask_indexing               ``x[mask]`` in a graph of static shapes, with `rowwise_ops` and `row_views`
selected_targets            padded targets of a CTC loss

Stands on adapters; used by `capture.trace` and `capture.side_effects`.
"""
