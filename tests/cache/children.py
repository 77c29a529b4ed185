"""Child processes for tests: forked, because a thousand of them must start in seconds."""

import os
import signal
import sys
import traceback
import warnings


def fork(work):
    """Run `work` in a child; returns its process id. The child's status is 1 if it raised."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may have made threads
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status(pid):
    """The exit status of a child; minus the signal's number if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_all(works):
    """The statuses of children that run at the same time."""
    return [status(pid) for pid in [fork(work) for work in works]]


def die():
    """End this process as `kill -9` does: no flush, no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)
