"""Copies of a module without its weights.

fake                a structure copy whose tensors are fakes on the CPU, and skeletons for the disk
fake_deepcopy       deep copies that also rebuild the functions and closures which Python's deep copy would share
"""
