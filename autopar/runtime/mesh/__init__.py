"""The mesh as processes and devices.

process_groups      makes the process groups of a mesh
roles               two roles with a world each, and the pairs between them
devices             the device of a rank
host_copies         copies between host and device

Stands on `runtime.fault`.
"""
