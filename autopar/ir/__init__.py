"""The one intermediate representation: `torch.fx` graphs whose values have a placement on each mesh axis.

placement, mesh         the four placements of a value, the table of conversions, axes and their sizes
conversions             the one node through which a value changes its placement
graph, storages, flow   reading and editing graphs; which memory their values take; what depends on what
signature, batch        what goes in and comes out: inputs, parameters with their pieces, the batch
recipe                  what a checkpoint holds for a model's tensors
own_backward            a model's own backwards as nodes
exported                what torch.export gave, checked: which parameters outputs have gradients for
compute_dtypes          dtypes that autocast and gradients have; operands that torch's kernels would refuse

Stands on adapters and ops. Attention, rules, steps and all above import it.
"""
