"""Step: optimizations of the graphs that a rank runs, after differentiation.

simplify                            peephole, and sums over ranks
bucket_gathers, bucket_gradients    fewer, larger collectives
schedule_collectives                communication beside computation

The last passes; `passes.pipelines` lists all of them in order.
"""
