"""Capture: a module becomes one flat functional graph, and a signature of its inputs and outputs.

front_end           `capture`: what the compiler calls, and the adapters of model libraries
trace               torch.export and the decomposition of what it returns
branches            branches and indices that depend on values of tensors
custom_autograd     `torch.autograd.Function` and derivatives that the forward itself takes
layer_dedup         identical layers are traced once
side_effects        what a forward does beside its operators
module_state        what a forward leaves in modules, and what a capture must put back
reads               what a forward reads from Python, as guards

The rooms stand on adapters; ``front_end`` also uses ir. Files here may use private names of torch, as adapters do.
"""
