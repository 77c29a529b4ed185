"""A directory that others can write to is refused, with the command that fixes it."""

import os
import shlex
import subprocess

import pytest

from piecegraph.cache import Cache, Key, Miss
from piecegraph.cache.files import check_private
from piecegraph.cache.signing import pinned, trust_all
from piecegraph.errors import UntrustedDirectory
from piecegraph.events import Events
from piecegraph.tools.cache_verify import Status, exit_status, verify

from .conftest import BLOBS, META


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o777, 0o701, 0o1777])
def test_open_directory_is_refused_and_its_command_fixes_it(root, mode):
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(UntrustedDirectory) as refusal:
        Cache(root, Events())
    assert (Status.UNTRUSTED & exit_status(verify(root))) == Status.UNTRUSTED
    subprocess.run(shlex.split(refusal.value.facts["command"]), check=True)
    Cache(root, Events())
    assert verify(root) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_ancestor_that_others_can_write_to_is_refused(tmp_path, mode):
    above = tmp_path / "with space"
    above.mkdir()
    above.chmod(mode)
    with pytest.raises(UntrustedDirectory, match="above it") as refusal:
        Cache(above / "deep" / "cache", Events())
    subprocess.run(shlex.split(refusal.value.facts["command"]), check=True)
    Cache(above / "deep" / "cache", Events())


def test_sticky_ancestor_is_allowed(tmp_path):
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    Cache(tmp_path / "sticky" / "cache", Events())


def test_link_is_followed_once_and_re_pointing_it_later_has_no_effect(tmp_path, key):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "ours")
    cache = Cache(link, Events())
    Cache(tmp_path / "theirs", Events()).publish("artifact", key, {}, {"x": b"evil"})
    link.unlink()
    link.symlink_to(tmp_path / "theirs")
    assert isinstance(cache.lookup("artifact", key), Miss)


def test_link_to_an_open_directory_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "inner").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "inner")
    with pytest.raises(UntrustedDirectory):
        Cache(tmp_path / "link", Events())
    with pytest.raises(NotADirectoryError):
        check_private(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_directory_of_another_user_is_refused(root, tmp_path):
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with pytest.raises(UntrustedDirectory, match="user 12345 owns it") as refusal:
        Cache(root, Events())
    subprocess.run(shlex.split(refusal.value.facts["command"]), check=True)
    Cache(root, Events())
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(UntrustedDirectory, match=r"user 12345 owns .* above it"):
        Cache(root, Events())
    os.chown(tmp_path, 0, -1)


def test_what_the_cache_creates_is_private_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b" / "cache", Events())
    finally:
        os.umask(before)


@pytest.fixture
def entry(cache, key):
    return cache.publish("artifact", key, META, BLOBS)


def test_signature_covers_all_of_the_entry(cache, entry, key, signer, trusted):
    signature = signer.sign(entry.manifest)
    assert trusted.refuses(entry.manifest, signature) is None
    for changed in (
        cache.publish("bundle", key, META, BLOBS),
        cache.publish("artifact", Key.of("trace", key.factors), META, BLOBS),
        cache.publish("artifact", key, {**META, "x": 1}, BLOBS),
        cache.publish("artifact", key, META, BLOBS | {"code.py": b"evil"}),
        cache.publish("artifact", key, META, {"other.py": BLOBS["code.py"]}),
    ):
        reason = trusted.refuses(changed.manifest, signature)
        assert reason == f"its signature is not that of key {signer.public.id}"


def test_pins_name_contents_and_not_keys(cache, entry, key):
    trust = pinned({entry.digest})
    assert trust(entry.manifest, None) is None
    other = cache.publish("artifact", key, META, BLOBS | {"code.py": b"evil"})
    assert trust(other.manifest, None) == f"{other.digest} is not pinned"
    for trust in (pinned({other.digest}), trust_all):
        assert trust(other.manifest, None) is None
