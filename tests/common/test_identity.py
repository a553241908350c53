import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import identity
from common.errors import TrustError


def test_a_signature_holds_for_its_label_and_payload_only() -> None:
    key = identity.SigningKey(Ed25519PrivateKey.generate())
    signature = key.sign("plan", b"payload")
    identity.verify(key.public, "plan", b"payload", signature)
    for public, label, payload, forged in (
        (key.public, "update", b"payload", signature),
        (key.public, "plan", b"other", signature),
        (identity.SigningKey(Ed25519PrivateKey.generate()).public, "plan", b"payload", signature),
        (key.public, "plan", b"payload", signature[:-1] + bytes([signature[-1] ^ 1])),
        (b"short", "plan", b"payload", signature),
    ):
        with pytest.raises(TrustError):
            identity.verify(public, label, payload, forged)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> identity.Verified:
    kept = identity.Verified(10_000)
    monkeypatch.setattr(identity, "_verified", kept)
    return kept


def test_a_process_remembers_no_signature_until_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runpy.run_path(identity.__file__)["_verified"].at_most == 0
    monkeypatch.setattr(identity, "_verified", identity.Verified(0))
    key = identity.SigningKey(Ed25519PrivateKey.generate())
    identity.verify(key.public, "plan", b"payload", key.sign("plan", b"payload"))
    assert len(identity._verified) == 0
    identity.remember_verified(2)
    for _ in range(2):
        identity.verify(key.public, "plan", b"payload", key.sign("plan", b"payload"))
    assert len(identity._verified) == 1


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.text(max_size=8), st.binary(max_size=40))
def test_a_remembered_signature_verifies_nothing_else(
    memory: identity.Verified, data: st.DataObject, label: str, payload: bytes
) -> None:
    """Whatever is moved or changed between key, label, payload and signature is verified anew, and fails."""
    key = identity.SigningKey(Ed25519PrivateKey.generate())
    signature = key.sign(label, payload)
    said = (key.public, label.encode(), payload, signature)
    identity.verify(key.public, label, payload, signature)
    kept = len(memory)
    identity.verify(key.public, label, payload, signature)
    whole = b"".join(said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=3, max_size=3)))
    moved = tuple(whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True))
    place, part = data.draw(st.integers(0, 255)), data.draw(st.integers(0, 3))
    flipped = bytearray(said[part] or b"\0")
    flipped[place % len(flipped)] ^= data.draw(st.integers(1, 255))
    for other in (moved, (*said[:part], bytes(flipped), *said[part + 1 :])):
        public, named, message, forged = other
        if other == said or (named + b"\n" + message == label.encode() + b"\n" + payload and other[0::3] == said[0::3]):
            continue
        for _ in range(2):  # a failure is not remembered as anything
            with pytest.raises(TrustError):
                identity.verify(public, named.decode("latin-1"), message, forged)
    assert len(memory) == kept < memory.at_most


def test_a_remembered_signature_is_not_computed_again(
    memory: identity.Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = identity.SigningKey(Ed25519PrivateKey.generate())
    signature = key.sign("plan", b"payload")
    identity.verify(key.public, "plan", b"payload", signature)
    monkeypatch.setattr(identity, "Ed25519PublicKey", None)
    identity.verify(key.public, "plan", b"payload", signature)
    with pytest.raises(AttributeError):
        identity.verify(key.public, "plan", b"payloads", signature)


def test_the_memory_of_signatures_forgets_the_oldest() -> None:
    memory = identity.Verified(3)
    for number in range(5):
        memory.add(b"key", b"%d" % number, b"signature")
        memory.add(b"key", b"%d" % number, b"signature")
    assert [memory.holds(b"key", b"%d" % number, b"signature") for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert len(memory) == 3


def test_the_memory_of_signatures_knows_where_each_part_ends() -> None:
    memory = identity.Verified(3)
    memory.add(b"ab", b"cd", b"ef")
    assert memory.holds(b"ab", b"cd", b"ef")
    for parts in ((b"a", b"bcd", b"ef"), (b"ab", b"cde", b"f"), (b"abcdef", b"", b""), (b"ef", b"cd", b"ab")):
        assert not memory.holds(*parts)


def test_many_threads_share_one_bounded_memory() -> None:
    memory = identity.Verified(50)

    def fill(thread: int) -> None:
        for number in range(500):
            memory.add(b"key", b"%d %d" % (thread, number), b"signature")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    assert len(memory) == 50


@given(st.binary(max_size=200))
def test_what_is_sealed_opens_only_with_the_key_and_context(plaintext: bytes) -> None:
    key = identity.SealingKey(X25519PrivateKey.generate())
    sealed = identity.seal(plaintext, recipient=key.public, context=b"round 1")
    assert plaintext not in sealed or len(plaintext) < 4
    assert key.open(sealed, context=b"round 1") == plaintext
    other = identity.SealingKey(X25519PrivateKey.generate())
    for attempt in (
        lambda: key.open(sealed, context=b"round 2"),
        lambda: other.open(sealed, context=b"round 1"),
        lambda: key.open(sealed[:-1], context=b"round 1"),
        lambda: key.open(bytes([sealed[0] ^ 1]) + sealed[1:], context=b"round 1"),
        lambda: key.open(b"", context=b"round 1"),
    ):
        with pytest.raises(TrustError):
            attempt()


def test_key_files_are_private_and_stable(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "identity.pem"
    first = identity.load_or_create_signing_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["identity.pem"]
    with pytest.raises(FileExistsError):
        identity.write_private(path, b"other")
    assert identity.load_or_create_signing_key(path).public == first.public
    path.chmod(0o640)
    with pytest.raises(TrustError, match="chmod 600"):
        identity.load_or_create_signing_key(path)


def test_a_damaged_or_foreign_key_file_is_refused(tmp_path: Path) -> None:
    identity.write_private(tmp_path / "a.pem", b"not a key")
    with pytest.raises(TrustError, match="no readable private key"):
        identity.load_or_create_signing_key(tmp_path / "a.pem")
    foreign = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    identity.write_private(tmp_path / "b.pem", foreign)
    with pytest.raises(TrustError, match="not an Ed25519"):
        identity.load_or_create_signing_key(tmp_path / "b.pem")
    identity.write_private(tmp_path / "c.key", b"short")
    with pytest.raises(TrustError, match="5 bytes"):
        identity.load_or_create_secret(tmp_path / "c.key")


def test_canonical_is_one_text_and_takes_no_nan() -> None:
    assert identity.canonical({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"é"],"b":1}'.encode()
    with pytest.raises(ValueError):
        identity.canonical({"a": float("nan")})


def test_the_roster_digest_depends_on_every_name_and_key() -> None:
    roster = {"site-1": b"a" * 32, "site-2": b"b" * 32}
    digests = {
        identity.roster_digest(roster),
        identity.roster_digest({**roster, "site-2": b"c" * 32}),
        identity.roster_digest({"site-1": b"a" * 32}),
        identity.roster_digest({"site-2": b"a" * 32, "site-1": b"b" * 32}),
    }
    assert len(digests) == 4
