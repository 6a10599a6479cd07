"""To be imported before anything is captured: on torch's builds with CUDA, where no GPU is to be seen.

There FakeTensorMode puts a device guard that counts one GPU in the place of CUDA's. The first backward after that
starts a thread for it, and then no process that is forked may run a backward. Whether there are devices autograd asks
once, at the first backward of all.
"""

import torch

if not torch.cuda.is_available():
    torch.zeros((), requires_grad=True).backward()
