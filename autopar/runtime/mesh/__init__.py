"""The mesh as processes and devices.

process_groups      the only file that makes process groups
devices             the device of a rank
timeouts            how long a collective may take
async_copies, offload_buffers       copies between host and device

Stands on `runtime.fault`.
"""
