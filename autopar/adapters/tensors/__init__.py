"""Memory and attributes of tensors without a public API of torch.

held_memory         weak references to storages, and references from elsewhere
first_words         samples of a tensor's memory, to detect writes that version counters miss
parameter_data      ``p.data = x``
tags                attributes that the user has set on a parameter

Every other package may import this one, which imports nothing of the project.
"""
