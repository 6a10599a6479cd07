"""Checkpoints on disk: files of tensors, manifests, Hugging Face folders.

checkpoint_dir      the folder of a run, changed atomically
memory_folder       checkpoints in the host memory of a node
tensor_storage, storage_layout, staging     tensors of a checkpoint: layout, checks and checksums, writing, reading
json_tree           nested values as JSON
optimizer_state     optimizer state by parameter name
hf_io, partial_reads, hf_atomic_write       safetensors folders of transformers

Used by `runtime.module` and `runtime.training`, which have `autopar.save` and `autopar.load`.
"""
