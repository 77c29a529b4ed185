"""`pytest_plugins = "piecegraph.testing"`: see `tools.testing`."""

from .tools.testing import CASES as CASES
from .tools.testing import LENGTHS as LENGTHS
from .tools.testing import Engine as Engine
from .tools.testing import GraphCase as GraphCase
from .tools.testing import batch_of as batch_of
from .tools.testing import case_of as case_of
from .tools.testing import delayed_graph_case as delayed_graph_case
from .tools.testing import graph_case as graph_case
from .tools.testing import must_be_sealed as must_be_sealed
