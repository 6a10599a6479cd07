"""The passes, in order, one line each."""

from autopar.passes import attention as attention  # fills the table of algorithms
from autopar.passes.autodiff.clone_aliased_grads import CloneAliasedGrads
from autopar.passes.canonicalize.cast_parameters import CastParameters
from autopar.passes.canonicalize.derive_rules import DeriveRules
from autopar.passes.canonicalize.expand_kv_heads import ExpandKvHeads
from autopar.passes.canonicalize.experts.cap_experts import CapExperts
from autopar.passes.canonicalize.experts.group_experts import GroupExperts
from autopar.passes.canonicalize.normalize import Normalize
from autopar.passes.canonicalize.split_biases import SplitBiases
from autopar.passes.canonicalize.token_windows import TokenWindows
from autopar.passes.partition.lower_to_local import LowerToLocal
from autopar.passes.partition.place_token_slices import PlaceTokenSlices
from autopar.passes.partition.propagate_placements import PropagatePlacements
from autopar.passes.partition.scale_products import ScaleProducts
from autopar.passes.partition.slice_early import SliceEarly
from autopar.passes.partition.zero_padding import ZeroPadding
from autopar.passes.step.async_tp import AsyncTensorParallel
from autopar.passes.step.bucket_gathers import BucketGathers
from autopar.passes.step.bucket_gradients import BucketGradients
from autopar.passes.step.fuse_accumulation import FuseAccumulation
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.passes.step.simplify import Simplify
from autopar.rewrite.pass_manager import Pass

GLOBAL_PASSES: tuple[Pass, ...] = (
    GroupExperts(),
    Normalize(),
    CastParameters(),
    ExpandKvHeads(),
    TokenWindows(),
    DeriveRules(),
)
PLACEMENT_PASSES: tuple[Pass, ...] = (
    CapExperts(),
    SplitBiases(),
    PlaceTokenSlices(),
    PropagatePlacements(),
    SliceEarly(),
    ZeroPadding(),
    ScaleProducts(),
    LowerToLocal(),
)
STEP_PASSES: tuple[Pass, ...] = (
    Simplify(),
    BucketGathers(),
    BucketGradients(),
    ScheduleCollectives(),
    AsyncTensorParallel(),
    FuseAccumulation(),
    CloneAliasedGrads(),
)
