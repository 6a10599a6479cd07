"""A training run: launch, data, save, load.

launch, launch_script       ranks on this machine
sampler                     the examples that each rank reads
save, load, async_save, disk_save     `autopar.save` and `autopar.load`
memory_save, memory_load, peer_nodes     the same in host memory
ema, expert_bias            moving averages, router biases

The top layer of runtime.
"""
