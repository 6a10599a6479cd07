"""What must be the same on several ranks, checked before it does harm.

rank_checks, tensor_hash        options and weights, compared by hash; an error of one rank is raised on all
batch_checks                    shapes and contents of a batch
exit_checks                     what is only known when the process ends

Stands on `runtime.comm`.
"""
