"""What must be the same on several ranks, checked before it does harm.

rank_checks, tensor_hash        options, weights and batches, compared by hash
batch_shapes, batch_contents    shapes and contents of a batch
consensus                       small all-reduces of flags
all_ranks                       an error of one rank is raised on all
exit_checks                     what is only known when the process ends

Stands on `runtime.comm`.
"""
