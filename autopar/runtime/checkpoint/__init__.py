"""Checkpoints on disk: files of tensors, manifests, Hugging Face folders.

checkpoint_dir      the folder of a run, atomic at every moment
tensor_storage, storage_layout, staging, checksums     tensors of a checkpoint: layout, checks, writing, reading
json_tree           nested values as JSON
optimizer_state     optimizer state by parameter name
hf_io, hf_files, partial_reads, hf_atomic_write, hf_save_args     safetensors folders of transformers

Used by `runtime.module` and `runtime.training`, which have `autopar.save` and `autopar.load`.
"""
