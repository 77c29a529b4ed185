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
    "forward_of_torch_class_patched": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Hardswish()
    def forward(self, x):
        return self.inner(x)
def build():
    return Model()
ORIGINAL = nn.Hardswish.forward
def enter():
    <<pass|nn.Hardswish.forward = lambda self, x: x * 3>>
def leave():
    nn.Hardswish.forward = ORIGINAL
""",
    "environment_changed": of_result(
        "",
        "x * float(os.environ.get('PG_TEST_GAIN', '1'))",
        "def enter():\n    os.environ['PG_TEST_GAIN'] = '<<2|3>>'\n"
        "def leave():\n    del os.environ['PG_TEST_GAIN']\n",
    ),
    "environment_set": of_result(
        "",
        "x * 2 if 'PG_TEST_ON' in os.environ else x",
        "def enter():\n    <<pass|os.environ['PG_TEST_ON'] = '1'>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
    ),
    "environment_unset": of_result(
        "",
        "x * 2 if os.getenv('PG_TEST_ON') else x",
        "def enter():\n    <<os.environ['PG_TEST_ON'] = '1'|pass>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
    ),
    "environment_item": of_result(
        "",
        "x * float(os.environ['PG_TEST_GAIN'])",
        "def enter():\n    os.environ['PG_TEST_GAIN'] = '<<2|3>>'\n"
        "def leave():\n    del os.environ['PG_TEST_GAIN']\n",
    ),
    "environment_in_helper": of_result(
        "import helper",
        "helper.f(x)",
        "def enter():\n    <<pass|os.environ['PG_TEST_ON'] = '1'>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
        helper="import os\n"
        "def f(x):\n    return x * 2 if os.environ.get('PG_TEST_ON') == '1' else x",
    ),
    "patched_functional": of_result(
        "",
        "F.silu(x)",
        "ORIGINAL = F.silu\ndef enter():\n    <<pass|F.silu = lambda x, inplace=False: x * 3>>\n"
        "def leave():\n    F.silu = ORIGINAL\n",
    ),
    "unpatched_functional": of_result(
        "",
        "F.silu(x)",
        "ORIGINAL = F.silu\ndef enter():\n    <<F.silu = lambda x, inplace=False: x * 3|pass>>\n"
        "def leave():\n    F.silu = ORIGINAL\n",
    ),
    "patched_functional_in_module": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
    def forward(self, x):
        return self.act(x)
def build():
    return Model()
ORIGINAL = F.silu
def enter():
    <<pass|F.silu = lambda x, inplace=False: x * 3>>
def leave():
    F.silu = ORIGINAL
""",
    "patched_torch_function": of_result(
        "",
        "torch.relu(x)",
        "ORIGINAL = torch.relu\ndef enter():\n    <<pass|torch.relu = lambda x: x * 3>>\n"
        "def leave():\n    torch.relu = ORIGINAL\n",
    ),
    "patched_math": of_result(
        "",
        "x * math.factorial(3)",
        "ORIGINAL = math.factorial\ndef enter():\n    <<pass|math.factorial = lambda n: 5>>\n"
        "def leave():\n    math.factorial = ORIGINAL\n",
    ),
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
    "default_dtype": of_result(
        "",
        "x * 2 if torch.get_default_dtype() is torch.float64 else x",
        "def enter():\n    torch.set_default_dtype(torch.float<<32|64>>)\n"
        "def leave():\n    torch.set_default_dtype(torch.float32)\n",
    ),
    "context_variable_like_state": of_result(
        "class State:\n    gain = 1.0\nSTATE = State()",
        "x * STATE.gain",
        "def enter():\n    STATE.gain = <<2.0|3.0>>\ndef leave():\n    pass\n",
    ),
    "environment_bytes_contains": under(
        "<<pass|os.environ['PG_TEST_ON'] = '1'>>",
        "x * 2 if b'PG_TEST_ON' in os.environb else x",
        "os.environ.pop('PG_TEST_ON', None)",
    ),
    "environment_by_another_name": under(
        "os.environ['PG_TEST_GAIN'] = '<<2|3>>'",
        "x * float(read('PG_TEST_GAIN', '1'))",
        "del os.environ['PG_TEST_GAIN']",
        "from os import getenv as read\n",
    ),
    "environment_object_by_another_name": under(
        "os.environ['PG_TEST_GAIN'] = '<<2|3>>'",
        "x * float(VARIABLES.get('PG_TEST_GAIN', '1'))",
        "del os.environ['PG_TEST_GAIN']",
        "VARIABLES = os.environ\n",
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
    "exempt_setting_that_the_model_reads": under(
        "torch._inductor.config.compile_threads = <<1|3>>",
        "x * torch._inductor.config.compile_threads",
        "torch._inductor.config.compile_threads = 1",
        "import torch._inductor.config\n",
    ),
    "torch_function_mode": under(
        "MODE.gain = <<2.0|3.0>>; MODE.__enter__()",
        "torch.sigmoid(x)",
        "MODE.__exit__(None, None, None)",
        """
class Mode(torch.overrides.TorchFunctionMode):
    gain = 1.0
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * self.gain if function is torch.sigmoid else result
MODE = Mode()
""",
    ),
    "global_forward_hook": under(
        "HOOKS.append(HOOK(lambda m, a, o: o * <<2.0|3.0>> if isinstance(m, nn.Tanh) else o))",
        "self.inner(x)",
        "HOOKS.pop().remove()",
        "HOOK, HOOKS = nn.modules.module.register_module_forward_hook, []\n",
        made="self.inner = nn.Tanh()",
    ),
    "global_forward_hook_added": under(
        "<<pass|HOOKS.append(HOOK(lambda m, a, out: out * 3 if isinstance(m, nn.Tanh) else out))>>",
        "self.inner(x)",
        "HOOKS and HOOKS.pop().remove()",
        "HOOK, HOOKS = nn.modules.module.register_module_forward_hook, []\n",
        made="self.inner = nn.Tanh()",
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
    "patched_method_of_tensors": under(
        "<<pass|torch.Tensor.relu = lambda self: self * 3>>",
        "x.relu()",
        "torch.Tensor.relu = ORIGINAL",
        "ORIGINAL = torch.Tensor.relu\n",
    ),
    "added_method_of_tensors": under(
        "torch.Tensor.gained = lambda self: self * <<2.0|3.0>>",
        "x.gained()",
        "del torch.Tensor.gained",
    ),
    "patched_operator_of_tensors": under(
        "<<pass|torch.Tensor.__mul__ = lambda self, other: self + other>>",
        "x * 2",
        "torch.Tensor.__mul__ = ORIGINAL",
        "ORIGINAL = torch.Tensor.__mul__\n",
    ),
    "patched_constant_of_math": under(
        "math.pi = <<2.0|3.0>>", "x * math.pi", "math.pi = ORIGINAL", "ORIGINAL = math.pi\n"
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
    "default_changed_later": under(
        "f.__defaults__ = (<<2.0|3.0>>,)", "f(x)", before="def f(x, gain=1.0): return x * gain\n"
    ),
    "keyword_default_changed_later": under(
        "f.__kwdefaults__ = {'gain': <<2.0|3.0>>}",
        "f(x)",
        before="def f(x, *, gain=1.0): return x * gain\n",
    ),
    "code_changed_later": under(
        "f.__code__ = (lambda x: x * <<2.0|3.0>>).__code__", "f(x)", before="def f(x): return x\n"
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
    "wrapper_around_a_method_of_tensors": under(
        "torch.Tensor.relu = wrapped(<<2.0|3.0>>)",
        "x.relu()",
        "torch.Tensor.relu = ORIGINAL",
        """
ORIGINAL = torch.Tensor.relu
def wrapped(gain):
    @functools.wraps(ORIGINAL)
    def relu(self):
        return ORIGINAL(self) * gain
    return relu
""",
    ),
    "rank": with_ranks("rank=<<0|1>>, world_size=4", "x * (1 + DIST.get_rank())"),
    "number_of_ranks": with_ranks("rank=0, world_size=<<2|4>>", "x * DIST.get_world_size()"),
    "rank_in_a_group": with_ranks(
        "rank=<<0|1>>, world_size=4",
        "x * (1 + DIST.get_rank(self.group))",
        made="self.group = DIST.group.WORLD",
    ),
    "method_of_a_group": with_ranks(
        "rank=0, world_size=<<2|4>>", "x * self.group.size()", made="self.group = DIST.group.WORLD"
    ),
    "coordinate_in_a_mesh": with_ranks(
        "rank=<<0|1>>, world_size=4",
        "x * (1 + self.mesh.get_local_rank())",
        made="self.mesh = DIST.device_mesh.init_device_mesh('cpu', (4,))",
    ),
    "ranks_started": under(
        "<<pass|DIST.init_process_group('fake', rank=0, world_size=4, store=FakeStore())>>",
        "x * 2 if DIST.is_initialized() else x",
        "DIST.is_initialized() and DIST.destroy_process_group()",
        RANKS,
    ),
    "recursion_limit": under(
        "sys.setrecursionlimit(<<5000|6000>>)",
        "x * sys.getrecursionlimit()",
        "sys.setrecursionlimit(1000)",
        "import sys\n",
    ),
    "dtype_of_autocast": under(
        "torch.set_autocast_dtype('cpu', torch.<<bfloat16|float16>>)",
        "x * 2 if torch.get_autocast_dtype('cpu') is torch.float16 else x",
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
    ),
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
    "global_of_a_linear_layer": under(
        "nn.modules.linear.F = <<F|OTHER>>",
        "self.inner(x)",
        "nn.modules.linear.F = F",
        "OTHER = types.ModuleType(F.__name__)\nOTHER.linear = lambda x, w, b: x * 3\n",
        made="self.inner = nn.Linear(8, 8)",
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
