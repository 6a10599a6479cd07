"""The passes: graph rewrites that carry out the plan and decide nothing.

canonicalize        one form per operation, before anything is sharded
partition           placements, conversions, and the local graph of one rank
autodiff            joint graphs, partitioned into forward and backward
stage               graphs of pipeline stages, parameters, chunked losses
step                peephole, buckets and overlap
attention           algorithms of context-parallel attention, which run inside one operator
pipelines           all passes in order, one line each

Imports rewrite, rules and steps; knows neither the planner's reasons nor process groups. Imported by `autopar.compile`.
"""
