"""Thin wrappers of private torch APIs, one file for each.

autograd, grad_fn_paths, grad_mode, hooks, dispatch, operators      autograd, and the dispatcher below it
fx                  fast creation of graphs and nodes
ac_regions          regions of `torch.utils.checkpoint`, recorded on nodes
distributed, dtensor, foreach, state_dict, inductor, flash_attn      single APIs of torch and of flash_attn
tensors             memory and attributes of tensors
copying             copies of modules without their weights
versions            tested versions of torch and transformers; older ones are refused

Every other package may import this one, which imports nothing of the project. No private name of torch leaves it.
"""

from autopar.adapters.versions import refuse_older

refuse_older("torch")
