"""Rank checks: values that must be equal on several ranks, compared before they are used.

rank_checks, tensor_hash        options and weights, compared by hash; an error of one rank is raised on all
batch_checks                    shapes and contents of a batch
exit_checks                     checks that can only run when the process ends

Stands on `runtime.comm`.
"""
