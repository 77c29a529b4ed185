"""What differs is read by nothing."""

from __future__ import annotations

UNREAD = {
    "attribute": ("self.other = '<<replica-1|replica-2>>'", "x * 2"),
    "number": ("self.other = <<1|2>>", "x * 2"),
    "path_of_a_checkpoint": (
        "self.config = types.SimpleNamespace(_name_or_path='/<<a|b>>/model', gain=2.0)",
        "x * self.config.gain",
    ),
    "field_of_an_object": (
        "self.config = types.SimpleNamespace(gain=2.0, started=<<1.0|2.0>>)",
        "x * self.config.gain",
    ),
    "order_of_a_dict": (
        "self.table = {<<'a': 1.0, 'b': 2.0|'b': 2.0, 'a': 1.0>>}",
        "x * self.table['a']",
    ),
    "other_key_of_a_dict": ("self.table = {'a': 2.0, 'b': <<1|2>>}", "x * self.table['a']"),
    "other_item_of_a_list": ("self.items = [2.0, <<1.0|5.0>>]", "x * self.items[0]"),
    "training_mode": ("self.train(<<True|False>>)", "x * 2"),
    "object_without_description": (
        "self.lock = __import__('<<threading|io>>').<<Lock|StringIO>>()",
        "x * 2",
    ),
    "name_of_a_submodule_class": ("self.inner = <<nn.Identity|nn.Tanh>>()", "x * 2"),
    "method_that_is_not_called": (
        "pass\n    def unused(self):\n        return <<1|2>>\n    def rest(self): pass",
        "x * 2",
    ),
    "global": ("pass", "x * 2"),
    "number_of_a_hook": (
        "<<pass|nn.Identity().register_forward_hook(print)>>; self.inner = nn.Tanh();"
        " self.inner.register_forward_hook(lambda m, a, out: out * 2.0)",
        "self.inner(x)",
    ),
    "method_added_to_tensors": ("torch.Tensor.other = lambda self: <<1|2>>", "x * 2"),
    "name_among_the_builtins": ("__builtins__['PG_OTHER'] = <<1|2>>", "x * 2"),
}
"""How the model is made, and what its forward gives: nothing reads what differs."""

UNREAD_MODEL = """
OTHER = <<1|2>>
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        MADE
    def forward(self, x):
        return RESULT
def enter():
    os.environ["TORCHX_JOB_ID"] = "job-<<1|2>>"
    os.environ["TRITON_SERVICE_HOST"] = "10.0.0.<<1|2>>"
    os.environ["TORCH_JOB_UID"] = "123e4567-e89b-12d3-a456-42661417400<<1|2>>"
def leave():
    for name in ("TORCHX_JOB_ID", "TRITON_SERVICE_HOST", "TORCH_JOB_UID"):
        del os.environ[name]
def build():
    return Model()
"""
