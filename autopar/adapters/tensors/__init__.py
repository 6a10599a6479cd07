"""Memory and attributes of tensors, where torch has no public name for it.

held_memory         storages: noted without being kept alive
first_words         a few words of a tensor's memory, to see writes that no version counter shows
parameter_data      ``p.data = x``
tags                attributes that somebody has set on a parameter

Everything may import this room; it imports nothing of the project.
"""
