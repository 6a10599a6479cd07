"""A training run: launch, data, save, load.

launch, launch_script       ranks on this machine
sampler                     the examples that each rank reads
save, load, async_save, checkpoint_contents     `autopar.save` and `autopar.load`
ema, expert_bias            moving averages, router biases

The top layer of runtime.
"""
