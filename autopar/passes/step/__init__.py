"""Step: optimizations of the graphs that a rank runs, after differentiation.

simplify                            peephole, and sums over ranks
bucket_gathers, bucket_gradients    fewer, larger collectives
prefetch, early_exchanges           communication that starts earlier

The last passes; `passes.pipelines` lists all of them in order.
"""
