"""The mesh as processes and devices.

process_groups      the only file that makes process groups
devices             the device of a rank
host_copies         copies between host and device

Stands on `runtime.fault`.
"""
