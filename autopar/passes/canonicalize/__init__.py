"""Canonicalize: rewrites of the captured graph that do not depend on the mesh, or only on its sizes.

normalize               one form for each operation, no in-place operator: runs the files below
canonical_ops, shapes, products                          one form of operators and views
attention_calls, match_sdpa, constant_masks              attention as `autopar::attention`
losses, norms, bags, per_example_index                   losses, norms, lookups
experts                 experts that are written out, and a limit on the tokens of each
functionalize_rng       random operators as `autopar::dropout` and `autopar::random`
cast_parameters, expand_kv_heads, split_biases, derive_rules     what the plan asks for before sharding

Runs first; `passes.partition` follows.
"""
