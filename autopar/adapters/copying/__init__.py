"""Copies of a module without its weights.

fake                structure copies with fake tensors on the CPU, and skeletons
fake_deepcopy       deep copies that also copy functions and closures, which Python's deepcopy shares
"""
