"""Thin shims over private names of torch: one file for each corner of it that the compiler needs.

autograd, grad_fn_paths, grad_mode, hooks, dispatch, operators      autograd, and what runs below it
fx                  graphs and their nodes, without what torch looks for in each
ac_regions          `torch.utils.checkpoint`, noted on the nodes of a capture
distributed, dtensor, foreach, state_dict, inductor, flash_attn      single names of torch, and of one other package
tensors             memory and attributes of tensors
copying             copies of modules without their weights
versions            which torch and transformers were tried; older ones are refused

Everything may import this room; it imports nothing of the project. Nothing private leaves it.
"""

from autopar.adapters.versions import refuse_older

refuse_older("torch")
