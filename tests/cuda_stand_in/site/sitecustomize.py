"""Python imports this when it starts: with STAND_IN_VALUES=1 kernels compute in every process.

`run.py` puts this folder on the path.
"""

import os
from importlib.util import find_spec

if os.environ.get("STAND_IN_VALUES") == "1" and find_spec("numpy"):  # else nothing is installed yet
    from tests.cuda_stand_in import values

    kept = values.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.cuda_stand_in import triton_values

        triton_values.install()
