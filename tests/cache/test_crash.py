"""A writer can be killed at any moment: entries are whole or absent, and stay once published."""

import math
import os
import random
import signal
import time

import pytest

from piecegraph.cache import Cache, Entry
from piecegraph.cache.evict import Limits
from piecegraph.events import Events
from piecegraph.tools.cache_verify import verify

from .children import die, fork, status
from .conftest import BLOBS, META, at_each_step, numbered

STEPS = ["blob written", "blob placed", "manifest written", "manifest placed"]


def dying_at(step, nth):
    """Kills the process the `nth` time a publish reaches `step`."""
    left = [nth]

    def fault(reached):
        left[0] -= reached == step
        if left[0] == 0:
            die()

    return fault


def test_the_steps_are_all_the_steps(root, events, key):
    seen = []
    with at_each_step(seen.append):
        Cache(root, events).publish("artifact", key, META, BLOBS)
    assert sorted(set(seen), key=seen.index) == STEPS
    assert seen.count("blob written") == len(BLOBS)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", [*STEPS, "done"])
def test_failure_W8_writer_killed_at_a_step(root, events, key, step, nth):
    if nth > 1 and not step.startswith("blob"):
        nth = 1

    def write():
        with at_each_step(dying_at(step, nth)):
            Cache(root, Events()).publish("artifact", key, META, BLOBS)
        die()

    assert status(fork(write)) == -signal.SIGKILL

    cache = Cache(root, events)
    found = cache.lookup("artifact", key)
    assert isinstance(found, Entry) == (step in ("manifest placed", "done"))
    assert verify(root) == []
    cache.publish("artifact", key, META, BLOBS)
    again = cache.lookup("artifact", key)
    assert again.contents == BLOBS


@pytest.mark.slow
@pytest.mark.parametrize("kills", [30, pytest.param(500, marks=pytest.mark.heavy)])
def test_failure_W8_random_kills(memory_root, events, kills):
    """Each child publishes keys in turn and reports each finished one; then it is killed.

    The parent waits for a few publishes and kills the child at a random moment of the next, so
    that the kills are spread over all steps on a busy machine too. A child begins where the one
    before was last heard: which keys are reached depends on what is waited for, not on speed.
    """
    chance = random.Random(0)
    reader = Cache(memory_root, events)
    one_publish = seconds_to_publish(reader)
    reached = 0
    out = set()
    for _ in range(kills):
        reports, report = os.pipe()

        def write(first=reached, report=report):
            cache = Cache(memory_root, Events(), limits=Limits(size=math.inf))
            os.write(report, READY)
            for number in range(first, first + 100):
                cache.publish("artifact", numbered(number % 20), {}, contents(number))
                os.write(report, bytes([number % 20]))

        pid = fork(write)
        os.close(report)
        heard = b"".join(os.read(reports, 1) for _ in range(1 + chance.randrange(3)))
        time.sleep(chance.uniform(0, 1.5 * one_publish))
        os.kill(pid, signal.SIGKILL)
        status(pid)
        heard += os.read(reports, 4096)
        os.close(reports)
        heard = heard.removeprefix(READY)
        reached += len(heard)
        out.update(heard)
        number = chance.randrange(20)
        assert_whole(reader, number, number in out)
    assert len(out) == 20
    for number in out:
        assert_whole(reader, number, True)
    assert verify(memory_root) == []
    assert not events.counters["cache.quarantined"]


READY = b"\xff"


def seconds_to_publish(cache):
    began = time.perf_counter()
    cache.publish("artifact", numbered(0), {}, contents(0))
    return time.perf_counter() - began


def contents(number):
    """Two blobs that name each other, and one that many entries share."""
    return {
        "first": b"%d/1" % number,
        "second": b"%d/2" % number,
        "shared": b"%d" % (number % 3) * 5000,
    }


def assert_whole(cache, number, published):
    found = cache.lookup("artifact", numbered(number))
    if isinstance(found, Entry):
        writer = int(found.contents["first"].split(b"/")[0])
        assert writer % 20 == number
        assert found.contents == contents(writer)
    else:
        assert not published, found
        assert found.reason == "absent"
