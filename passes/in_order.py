"""The passes, in order, one line each."""

from autopar.passes import attention as attention  # fills the table of algorithms
from autopar.passes.bucket_gathers import BucketGathers
from autopar.passes.bucket_gradients import BucketGradients
from autopar.passes.cap_experts import CapExperts
from autopar.passes.cast_parameters import CastParameters
from autopar.passes.derive_rules import DeriveRules
from autopar.passes.early_exchanges import EarlyExchanges
from autopar.passes.expand_kv_heads import ExpandKvHeads
from autopar.passes.join_sums import JoinSums
from autopar.passes.localize_shapes import LocalizeShapes
from autopar.passes.normalize import Normalize
from autopar.passes.own_gradients import OwnGradients
from autopar.passes.place_token_slices import PlaceTokenSlices
from autopar.passes.prefetch_copies import PrefetchCopies
from autopar.passes.prefetch_gathers import PrefetchGathers
from autopar.passes.propagate_placements import PropagatePlacements
from autopar.passes.simplify_arithmetic import SimplifyArithmetic
from autopar.passes.simplify_views import SimplifyViews
from autopar.passes.slice_early import SliceEarly
from autopar.passes.split_biases import SplitBiases
from autopar.rewrite.pass_manager import Pass

GLOBAL_PASSES: tuple[Pass, ...] = (Normalize(), CastParameters(), ExpandKvHeads(), DeriveRules())
PLACEMENT_PASSES: tuple[Pass, ...] = (
    CapExperts(),
    SplitBiases(),
    PlaceTokenSlices(),
    PropagatePlacements(),
    SliceEarly(),
    LocalizeShapes(),
)
STEP_PASSES: tuple[Pass, ...] = (
    SimplifyViews(),
    SimplifyArithmetic(),
    PrefetchGathers(),
    PrefetchCopies(),
    JoinSums(),
    BucketGathers(),
    BucketGradients(),
    EarlyExchanges(),
    OwnGradients(),
)
