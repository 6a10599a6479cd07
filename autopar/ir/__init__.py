"""The one intermediate representation: `torch.fx` graphs whose values have a placement on each mesh axis.

placement, mesh         the four placements of a value, the table of conversions, axes and their sizes
conversions             the one node through which a value changes its placement
graph, storages, flow   reading and editing graphs; which memory their values take; what depends on what
traffic                 calls and bytes that a rank sends, and their formulas
signature, batch        inputs and outputs: inputs, parameters with their shards, the batch
weight_conversion       how checkpoint tensors map to a model's
custom_backward         a model's custom backwards as nodes
exported                the result of torch.export, checked: which parameters outputs have gradients for
compute_dtypes          dtypes under autocast and of gradients; operands that torch's kernels would refuse

Imports adapters and ops. Attention, rules, steps and everything above import it.
"""
