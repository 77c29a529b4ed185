"""Signed layers: what an attacker can do to one is refused; keys expire and are revoked."""

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from piecegraph.cache import Cache, Entry, Key
from piecegraph.cache.directory import DirectoryLayer, private_directory
from piecegraph.cache.keys.environment import SIGNING_KEY_FILE, TRUSTED_KEYS_FILE
from piecegraph.cache.manifest import BlobRef, decode, encode
from piecegraph.cache.names import blob_name, entry_name
from piecegraph.cache.remote import RemoteLayer
from piecegraph.cache.signing import (
    SigningKey,
    TrustedKeys,
    read_signing_key,
    read_trusted_keys,
    signing_key,
    trust_all,
    trusted_keys,
    write_keys,
)
from piecegraph.errors import InvalidKeyFile
from piecegraph.events import Events

from .conftest import BLOBS, META

OTHER = Key.of("codegen", {"another": "entry"})
TODAY = datetime.now(UTC).date()


@pytest.fixture
def layer(tmp_path, key, signer):
    """A directory with two signed entries, as a builder fills it."""
    url = f"file://{tmp_path}/layer"
    cache = Cache(
        None, Events(), shared=[RemoteLayer(url, trust_all, write_back=True, signer=signer)]
    )
    cache.publish("artifact", key, META, BLOBS)
    cache.publish("artifact", OTHER, META, {"code.py": b"other"})
    return tmp_path / "layer"


def looked_up(layer, key, trusted):
    return Cache(None, Events(), shared=[DirectoryLayer(layer, trusted.refuses)]).lookup(
        "artifact", key
    )


def rewritten(layer, key, change):
    path = layer / entry_name("artifact", key.digest)
    manifest, signature = decode(path.read_bytes())
    assert signature is not None
    path.write_bytes(encode(*change(manifest, signature)))


def evil(manifest):
    return replace(manifest, blobs={**manifest.blobs, "code.py": BlobRef.of(b"evil")})


def changed_blob(layer, key):
    (layer / blob_name(BlobRef.of(BLOBS["code.py"]).sha256)).write_bytes(b"evil")


def changed_manifest(layer, key):
    content = BlobRef.of(b"evil")
    (layer / blob_name(content.sha256)).parent.mkdir(parents=True, exist_ok=True)
    (layer / blob_name(content.sha256)).write_bytes(b"evil")
    rewritten(layer, key, lambda manifest, signature: (evil(manifest), signature))


def entry_at_another_key(layer, key):
    shutil.copy(
        layer / entry_name("artifact", OTHER.digest), layer / entry_name("artifact", key.digest)
    )


def signature_of_another_entry(layer, key):
    _, taken = decode((layer / entry_name("artifact", OTHER.digest)).read_bytes())
    rewritten(layer, key, lambda manifest, _: (manifest, taken))


def signature_stripped(layer, key):
    rewritten(layer, key, lambda manifest, _: (manifest, None))


def signature_of_zeros(layer, key):
    rewritten(layer, key, lambda manifest, text: (manifest, f"{text[:-128]}{'0' * 128}"))


def signed_with_an_unknown_key(layer, key):
    rewritten(
        layer, key, lambda manifest, _: (evil(manifest), SigningKey.new().sign(evil(manifest)))
    )


def unknown_key_under_the_name_of_a_trusted_one(layer, key):
    def forge(manifest, signature):
        trusted_id = signature.split()[1]
        word, _, *rest = SigningKey.new().sign(manifest).split()
        return manifest, " ".join([word, trusted_id, *rest])

    rewritten(layer, key, forge)


def epoch_raised_without_the_key(layer, key):
    def forge(manifest, signature):
        word, name, _, value = signature.split()
        return manifest, f"{word} {name} 9 {value}"

    rewritten(layer, key, forge)


def another_algorithm(layer, key):
    rewritten(layer, key, lambda manifest, _: (manifest, "hmac-sha256 " + "0" * 64))


def own_keys_put_into_the_layer(layer, key):
    """No key is ever read from a layer."""
    attacker = SigningKey.new()
    write_keys(attacker, layer / "trusted")
    rewritten(layer, key, lambda manifest, _: (evil(manifest), attacker.sign(evil(manifest))))


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (changed_blob, "damaged: blob code.py has other bytes"),
        (changed_manifest, "untrusted: its signature is not that of key"),
        (entry_at_another_key, "damaged: the manifest is of another entry"),
        (signature_of_another_entry, "untrusted: its signature is not that of key"),
        (signature_stripped, "untrusted: it is not signed"),
        (signature_of_zeros, "untrusted: its signature is not that of key"),
        (signed_with_an_unknown_key, "which is not trusted here"),
        (unknown_key_under_the_name_of_a_trusted_one, "its signature is not that of key"),
        (epoch_raised_without_the_key, "untrusted: its signature is not that of key"),
        (another_algorithm, "untrusted: its signature is not one of Ed25519"),
        (own_keys_put_into_the_layer, "which is not trusted here"),
    ],
)
def test_attack_on_a_signed_layer_is_refused(layer, key, trusted, attack, reason):
    assert isinstance(looked_up(layer, key, trusted), Entry)
    attack(layer, key)
    missed = looked_up(layer, key, trusted)
    assert reason in f"{missed.reason}: {missed.detail}"


@pytest.mark.parametrize(
    ("options", "revoked", "reason"),
    [
        (f"expires={TODAY - timedelta(days=2)}", "", "expired on"),
        ("epoch=2", "", "it was signed in epoch 1, before 2 of key"),
        ("", "revoked {id}", "is revoked"),
        ("", "revoked {value}", "is revoked"),
    ],
)
def test_key_that_is_withdrawn_refuses_what_it_has_signed(
    layer, key, signer, tmp_path, options, revoked, reason
):
    """Also a replay of an old entry: its epoch is signed. Two keys may be trusted at once."""
    public, file = signer.public, tmp_path / "trusted"
    lines = [f"ed25519 {public.value} name=old {options} # until summer", ""]
    lines += [SigningKey.new(name="new").public.line()]
    file.write_text("\n".join(lines))
    valid_for_now = replace(public, expires=TODAY + timedelta(days=1))
    assert isinstance(looked_up(layer, key, TrustedKeys({public.id: valid_for_now})), Entry)
    file.write_text("\n".join([*lines, revoked.format(id=public.id, value=public.value)]))
    missed = looked_up(layer, key, read_trusted_keys(file))
    assert reason in missed.detail


def test_revocation_reaches_copies_in_private_directories(layer, key, trusted, root, signer):
    shared = [DirectoryLayer(layer, trusted.refuses)]
    assert isinstance(Cache(root, Events(), shared=shared).lookup("artifact", key), Entry)
    revoking = TrustedKeys(trusted.keys, frozenset({signer.public.id}))
    cache = Cache(private_directory(root, trust=revoking.revokes), Events())
    missed = cache.lookup("artifact", key)
    assert missed.detail == f"key {signer.public.id} is revoked"
    cache.publish("artifact", key, META, BLOBS)  # compiled here: unsigned, and trusted
    assert isinstance(cache.lookup("artifact", key), Entry)


def test_builder_signs_again_in_the_next_epoch(layer, key, trusted, root, signer):
    shared = [DirectoryLayer(layer, trusted.refuses)]
    Cache(root, Events(), shared=shared).lookup("artifact", key)
    later = signer.next_epoch()
    only_later = TrustedKeys({later.public.id: later.public})
    remote = RemoteLayer(f"file://{layer}", only_later.refuses, write_back=True, signer=later)
    Cache(root, Events(), shared=[remote]).lookup("artifact", key)
    assert isinstance(looked_up(layer, key, only_later), Entry)


def test_builder_does_not_sign_again_what_it_has_withdrawn(tmp_path, key, root, signer):
    """Its own directory has the bad build, too, which no server may get in the next epoch."""

    def builder(signer):
        keys = TrustedKeys({signer.public.id: signer.public})
        url = f"file://{tmp_path}/layer"
        shared = [RemoteLayer(url, keys.refuses, write_back=True, signer=signer)]
        private = private_directory(root, trust=keys.revokes)
        return Cache(private, Events(), shared=shared, sign=signer.sign), keys

    builder(signer)[0].publish("artifact", key, META, BLOBS)
    assert isinstance(builder(signer)[0].lookup("artifact", key), Entry)
    cache, trusted = builder(signer.next_epoch())
    assert "it was signed in epoch 1" in cache.lookup("artifact", key).detail
    assert not isinstance(looked_up(tmp_path / "layer", key, trusted), Entry)
    cache.publish("artifact", key, META, {"code.py": b"a good build"})
    assert isinstance(builder(signer.next_epoch())[0].lookup("artifact", key), Entry)
    assert isinstance(looked_up(tmp_path / "layer", key, trusted), Entry)


def test_server_that_writes_back_passes_the_signature_on(layer, key, trusted, root, tmp_path):
    mirror = RemoteLayer(f"file://{tmp_path}/mirror", trusted.refuses, write_back=True)
    Cache(root, Events(), shared=[DirectoryLayer(layer, trusted.refuses)]).lookup("artifact", key)
    Cache(root, Events(), shared=[mirror]).lookup("artifact", key)
    assert isinstance(looked_up(tmp_path / "mirror", key, trusted), Entry)


def test_keys_are_written_and_read(tmp_path, monkeypatch):
    for variable in (SIGNING_KEY_FILE, TRUSTED_KEYS_FILE):
        monkeypatch.delenv(variable, raising=False)
    assert (signing_key(), trusted_keys(None)) == (None, None)
    key = SigningKey.new(name="ci", expires=TODAY)
    write_keys(key, tmp_path / "ci.key")
    monkeypatch.setenv(SIGNING_KEY_FILE, str(tmp_path / "ci.key"))
    assert signing_key() == key
    assert key.private not in repr(key)
    only_own = trusted_keys(key)
    assert only_own.keys == {key.public.id: key.public}
    assert read_trusted_keys(tmp_path / "ci.key.pub") == only_own
    other = SigningKey.new().public
    (tmp_path / "all").write_text(f"{key.public.line()}\n{other.line()}")
    monkeypatch.setenv(TRUSTED_KEYS_FILE, str(tmp_path / "all"))
    both = trusted_keys(key)
    assert both.keys.keys() == {key.public.id, other.id}


PRIVATE, PUBLIC = f"ed25519-private {'1' * 64}", f"ed25519 {'1' * 64}"


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (PRIVATE, 0o644, "others can read it"),
        (f"{PRIVATE} expires=2020-01-01", 0o600, "expired on 2020-01-01"),
        (PUBLIC, 0o600, "it holds 0 private keys"),
        ("ed25519-private short", 0o600, "line 1: a key has 64 hexadecimal digits"),
        (None, 0o600, "No such file"),
    ],
)
def test_unsafe_signing_key_is_refused(tmp_path, content, mode, reason):
    if content is not None:
        (tmp_path / "key").write_text(content)
        (tmp_path / "key").chmod(mode)
    with pytest.raises(InvalidKeyFile, match=reason):
        read_signing_key(tmp_path / "key")


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (PUBLIC, 0o666, "others can write to"),
        (PUBLIC, 0o664, "others can write to"),
        (f"{PUBLIC}\n{PUBLIC}", 0o644, "twice"),
        (PRIVATE, 0o644, "a private key"),
        (f"\n{PUBLIC} until=2030-01-01", 0o644, "line 2: unknown option until=2030-01-01"),
        (f"{PUBLIC} expires=soon", 0o644, "line 1: Invalid isoformat"),
        ("rsa 1234", 0o644, "unknown word rsa"),
        ("revoked", 0o644, "64 hexadecimal digits"),
    ],
)
def test_file_of_trusted_keys_that_others_can_change_or_is_malformed_is_refused(
    tmp_path, content, mode, reason
):
    (tmp_path / "keys").write_text(content)
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(InvalidKeyFile, match=reason):
        read_trusted_keys(tmp_path / "keys")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_trusted_keys_that_another_user_has_replaced_is_refused(tmp_path):
    (tmp_path / "keys").write_text(PUBLIC)
    os.chown(tmp_path / "keys", 12345, -1)
    with pytest.raises(InvalidKeyFile, match="user 12345 owns"):
        read_trusted_keys(tmp_path / "keys")


def test_key_file_of_a_directory_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "keys").write_text(PUBLIC)
    with pytest.raises(InvalidKeyFile, match="others can write to"):
        read_trusted_keys(tmp_path / "open" / "keys")


def test_signature_is_no_part_of_what_identifies_an_entry(layer, key, trusted):
    found = looked_up(layer, key, trusted)
    assert json.loads(found.manifest.line()).keys() & {"signature", "epoch"} == set()
