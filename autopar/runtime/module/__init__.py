"""ParallelModule: the user's model on a mesh.

parallel_module     the class: train_step, forward, modes
module_facade, overridden_methods, module_repr     the user's module as torch and its library know it
autograd_bridge     a step as one node of autograd
state_dict, state_dict_hooks     its state
served_weights, role_weights     the weights that a server uses, and those that one role of it uses
argument_checks     arguments of `autopar.parallelize`

Stands on `runtime.exec`, `runtime.guards` and `runtime.checkpoint`.
"""
