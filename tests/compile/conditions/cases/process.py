"""State of the process: environment, flags of torch, patched functions."""

from __future__ import annotations

from .model import of_result, under

RANKS = """
import torch.distributed as DIST
from torch.testing._internal.distributed.fake_pg import FakeStore
"""


def with_ranks(ranks: str, result: str, made: str = "") -> str:
    """A model of one rank, without the others."""
    start = f"DIST.init_process_group('fake', {ranks}, store=FakeStore())"
    return under(start, result, "DIST.destroy_process_group()", RANKS, made)


CASES = {
    "cudnn_benchmark": of_result(
        "",
        "x * 2 if torch.backends.cudnn.benchmark else x",
        "def enter():\n    torch.backends.cudnn.benchmark = <<False|True>>\n"
        "def leave():\n    torch.backends.cudnn.benchmark = False\n",
    ),
    "deterministic": of_result(
        "",
        "x * 2 if torch.are_deterministic_algorithms_enabled() else x",
        "def enter():\n    torch.use_deterministic_algorithms(<<False|True>>)\n"
        "def leave():\n    torch.use_deterministic_algorithms(False)\n",
    ),
    "environment_name_computed": under(
        "os.environ['PG_TEST_GAIN'] = '<<2|3>>'",
        "x * float(os.environ['PG_TEST_' + type(self).name.upper()])",
        "del os.environ['PG_TEST_GAIN']",
    ).replace("    def forward", "    name = 'gain'\n    def forward"),
    "environment_iterated": under(
        "<<pass|os.environ['PG_TEST_ON'] = '1'>>",
        "x * (2 if [k for k in os.environ if k == 'PG_TEST_ON'] else 1)",
        "os.environ.pop('PG_TEST_ON', None)",
    ),
    "environment_length": under(
        "<<pass|os.environ['PG_TEST_ON'] = '1'>>",
        "x * len(os.environ)",
        "os.environ.pop('PG_TEST_ON', None)",
    ),
    "fill_of_empty_memory": under(
        "torch.utils.deterministic.fill_uninitialized_memory = <<True|False>>",
        "x * 2 if torch.utils.deterministic.fill_uninitialized_memory else x",
        "torch.utils.deterministic.fill_uninitialized_memory = True",
    ),
    "default_dtype_of_a_factory": under(
        "torch.set_default_dtype(torch.float<<32|64>>)",
        "x * torch.ones(8)",
        "torch.set_default_dtype(torch.float32)",
    ),
    "setting_of_dynamo": under(
        "torch._dynamo.config.capture_dynamic_output_shape_ops = <<False|True>>",
        "x * 2 if torch._dynamo.config.capture_dynamic_output_shape_ops else x",
        "torch._dynamo.config.capture_dynamic_output_shape_ops = False",
    ),
    "global_pre_hook": under(
        "HOOKS.append(HOOK(lambda m, a: (a[0] * <<2.0|3.0>>,) if isinstance(m, nn.Tanh) else a))",
        "self.inner(x)",
        "HOOKS.pop().remove()",
        "HOOK, HOOKS = nn.modules.module.register_module_forward_pre_hook, []\n",
        made="self.inner = nn.Tanh()",
    ),
    "patched_call_of_modules": under(
        "nn.Module.__call__ = <<ORIGINAL|(lambda self, *a: ORIGINAL(self, *a) * 3)>>",
        "self.inner(x)",
        "nn.Module.__call__ = ORIGINAL",
        "ORIGINAL = nn.Module.__call__\n",
        made="self.inner = nn.Tanh()",
    ),
    "added_method_of_tensors": under(
        "torch.Tensor.gained = lambda self: self * <<2.0|3.0>>",
        "x.gained()",
        "del torch.Tensor.gained",
    ),
    "patched_builtin": under(
        "builtins.sum = <<sum|(lambda values: 5.0)>>",
        "x * sum([1.0, 2.0])",
        "builtins.sum = ORIGINAL",
        "import builtins\nORIGINAL = sum\n",
    ),
    "builtin_shadowed_by_a_global": under(
        "<<pass|globals().__setitem__('max', lambda *v: 5.0)>>",
        "x * max(2.0, 1.0)",
        "globals().pop('max', None)",
    ),
    "thread_local": under(
        "LOCAL.gain = <<2.0|3.0>>",
        "x * LOCAL.gain",
        before="import threading\nLOCAL = threading.local()\n",
    ),
    "builtin_of_an_inlined_helper": of_result(
        "import builtins, helper\n",
        "helper.f(x)",
        "def enter():\n    builtins.PG_OTHER = <<2.0|3.0>>\n"
        "def leave():\n    del builtins.PG_OTHER\n",
        "def f(x): return x * PG_OTHER",
    ),
    "wrapper_around_the_call_of_modules": under(
        "nn.Module.__call__ = wrapped(<<2.0|3.0>>)",
        "self.inner(x)",
        "nn.Module.__call__ = ORIGINAL",
        """
ORIGINAL = nn.Module.__call__
def wrapped(gain):
    @functools.wraps(ORIGINAL)
    def call(self, *args):
        return ORIGINAL(self, *args) * gain if isinstance(self, nn.Tanh) else ORIGINAL(self, *args)
    return call
""",
        made="self.inner = nn.Tanh()",
    ),
    "rank": with_ranks("rank=<<0|1>>, world_size=4", "x * (1 + DIST.get_rank())"),
    "number_of_ranks": with_ranks("rank=0, world_size=<<2|4>>", "x * DIST.get_world_size()"),
    "setting_that_dynamo_guards": under(
        "torch.__future__.set_overwrite_module_params_on_conversion(<<True|False>>)",
        "x * 2 if torch.__future__.get_overwrite_module_params_on_conversion() else x",
        "torch.__future__.set_overwrite_module_params_on_conversion(False)",
    ),
    "global_of_an_activation": under(
        "nn.modules.activation.F = <<F|types.SimpleNamespace(silu=lambda x, inplace: x * 3)>>",
        "self.inner(x)",
        "nn.modules.activation.F = F",
        made="self.inner = nn.SiLU()",
    ),
    "functions_of_torch_replaced": under(
        "torch.nn.functional = <<F|types.SimpleNamespace(silu=lambda x: x * 3)>>",
        "torch.nn.functional.silu(x)",
        "torch.nn.functional = F",
    ),
    "functions_of_torch_by_a_global": under(
        "globals()['F'] = <<KEPT|types.SimpleNamespace(silu=lambda x: x * 3)>>",
        "F.silu(x)",
        before="KEPT = F\n",
    ),
}
