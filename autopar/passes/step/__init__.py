"""Step: optimizations of the graphs that a rank runs, after differentiation.

simplify_views, simplify_arithmetic     peephole
merge_all_reduces, bucket_gathers, bucket_gradients     fewer, larger collectives
prefetch_gathers, prefetch_copies, early_exchanges      communication that starts earlier

The last passes; `passes.pipelines` lists all of them in order.
"""
