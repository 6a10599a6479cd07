"""A training run: launch, data, save, load.

launch              ranks on this machine
sampler             which examples each rank reads
save, load, async_save      `autopar.save` and `autopar.load`
ema, expert_bias    moving averages, router biases
bootstrap_simulation        what starting a world of any size costs

The top room of runtime.
"""
