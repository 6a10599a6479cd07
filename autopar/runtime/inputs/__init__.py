"""What goes into a step and comes out of it.

call_arguments      arguments by the parameter names of the forward
padding             batches padded to one of a few sizes
unused_inputs       numbers and lists that vary and have no effect, left out
image_padding       images of any sizes, in rows of one of a few numbers of patches
image_dealing       images that ranks compute for each other
outputs             local results as DTensors in the user's structure, with the rows of the global batch
loss_fn             a custom loss, traced with the model

Used by `runtime.guards` and `runtime.module`.
"""
