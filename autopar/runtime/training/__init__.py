"""A training run: launch, data, save, load.

launch, launch_script       ranks on this machine
sampler                     which examples each rank reads
save, load, async_save, checkpoint_contents     `autopar.save` and `autopar.load`
ema, expert_bias            moving averages, router biases

The top room of runtime.
"""
