"""Which runtime mode, which descriptor, which sizes: policy without tensors or devices.

`make_plan` lists the graphs to capture and `Dispatcher` chooses one for each `Batch`. `resolve`
turns a requested graph mode into a usable one. `capture_sizes` chooses sizes, `buckets` plans
and checks the padded shapes of engines that bucket in several dimensions.
"""

from .batch import FORM as FORM
from .batch import NO_GRAPH as NO_GRAPH
from .batch import Batch as Batch
from .batch import BatchDescriptor as BatchDescriptor
from .batch import Decision as Decision
from .batch import Reason as Reason
from .buckets.bucket import Bucket as Bucket
from .buckets.bucket import BucketLimits as BucketLimits
from .buckets.bucket import BucketMemory as BucketMemory
from .buckets.bucket import Phase as Phase
from .buckets.coverage import Hole as Hole
from .buckets.coverage import close_holes as close_holes
from .buckets.coverage import find_holes as find_holes
from .buckets.file import read_buckets as read_buckets
from .buckets.lookup import BucketTable as BucketTable
from .buckets.ranges import BucketStrategy as BucketStrategy
from .buckets.ranges import check_parameters as check_parameters
from .buckets.ranges import filter_buckets as filter_buckets
from .buckets.ranges import plan_buckets as plan_buckets
from .buckets.ranges import setting_for as setting_for
from .capture_sizes import DENSE_END as DENSE_END
from .capture_sizes import DecodeTier as DecodeTier
from .capture_sizes import align_sizes as align_sizes
from .capture_sizes import decode_tiers as decode_tiers
from .capture_sizes import default_capture_sizes as default_capture_sizes
from .capture_sizes import user_capture_sizes as user_capture_sizes
from .dispatcher import Candidate as Candidate
from .dispatcher import Dispatcher as Dispatcher
from .modes import AttentionSupport as AttentionSupport
from .modes import CaptureStrategy as CaptureStrategy
from .modes import GraphMode as GraphMode
from .modes import LoraGraphs as LoraGraphs
from .modes import RuntimeMode as RuntimeMode
from .plan import Axis as Axis
from .plan import CapturePhase as CapturePhase
from .plan import DispatchPlan as DispatchPlan
from .plan import PaddingLimit as PaddingLimit
from .plan import PlanEntry as PlanEntry
from .plan import bucket_plan as bucket_plan
from .plan import lora_cases as lora_cases
from .plan import make_plan as make_plan
from .resolve import LEVEL_MODES as LEVEL_MODES
from .resolve import ModeChange as ModeChange
from .resolve import ResolvedMode as ResolvedMode
from .resolve import resolve_mode as resolve_mode
from .uncovered import sizes_for as sizes_for
from .uncovered import uncovered_decodes as uncovered_decodes
from .uncovered import unreached_sizes as unreached_sizes
