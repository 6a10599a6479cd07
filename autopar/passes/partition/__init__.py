"""Partition: the global graph gets placements, then becomes the local graph of one rank (SPMD).

propagate_placements    a placement for every value on every mesh axis, with conversions between them, those of a
                        model's custom backwards included
place_token_slices      the axis of token slices
slice_early             values computed only where they are needed
lower_to_local          global shapes -> local shapes

Runs after `passes.canonicalize`, before `passes.autodiff`.
"""
