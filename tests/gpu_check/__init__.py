"""What the first user with a GPU runs: `make gpu-check`, or by hand

    python -m tests.gpu_check [--device cpu] [--only kernels,step] [--json gpu_check.json]

Each check runs in processes of its own, with a limit of seconds, since an error of a kernel ends CUDA for its whole
process. It yields rows; one that dies, hangs or raises becomes a row as well. At the end there are one table, one JSON,
and an exit status that is 1 if anything failed. On a machine without a GPU the same code runs on the CPU.

    facts       what is there                               step      a step on a world of one
    kernels     attention kernels against plain math        ranks     verify on meshes, bandwidths, ranks that fail
    experts     grouped products                            order     collectives in compiled code
    dropout     bits of masks                               speed     a llama: tokens per second, time, memory
"""
