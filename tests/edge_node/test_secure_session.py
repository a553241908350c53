"""A site's secure sessions on its disk: written before said, one alive, records that cannot be read stop the round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, PrivacyError, RoundError, TransportError, TrustError
from common.identity import roster_digest
from common.plan import RoundPlan
from common.secagg import SKETCH, SUM_ONLY, Limits, Terms
from common.secagg.encoding import decode
from common.secagg.messages import Reply, Signed
from common.update import PrivateUpdate
from edge_node import secure_session
from edge_node.policy import ServeOnly, SitePolicy, read_policy
from edge_node.secure_session import SecureSessions, UpdateRecords, approved_members
from tests.common.secagg.federation import Federation, make_plan, new_key


class World:
    """Four sites; the first one is the product's, on a folder, the others are sessions in memory."""

    def __init__(self, folder: Path) -> None:
        self.federation = Federation(4, limits=Limits())
        self.folder = folder
        keys = {name: key.public for name, key in self.federation.keys.items()}
        self.plan: RoundPlan = replace(make_plan(self.federation.weights), roster_digest=roster_digest(keys))
        self.law = SitePolicy.model_validate(
            {
                "privacy": {"unit": "trajectory", "epsilon_total": 8.0, "delta": 1e-5},
                "upload": {"updates": True, "aggregation": (SUM_ONLY, SKETCH)},
                "roster": [{"name": n, "key": k.hex(), "organisation": f"org-{n}"} for n, k in keys.items()],
            }
        )
        self.terms: Terms = replace(self.federation.terms(), plan_digest=self.plan.digest)
        self.sessions = self.restarted()

    def check(self, mode: str) -> None:
        """What the product's site says before it trains."""
        self.sessions.check(self.plan, self.law, mode=mode, dimension=self.terms.dimension)

    def restarted(self) -> SecureSessions:
        server = self.federation.server_key.public
        return SecureSessions(self.folder, name="s01", key=self.federation.keys["s01"], server=server)

    def say(self, request: bytes, *, mode: str = SKETCH) -> bytes:
        if self.sessions.is_live(self.plan, mode, request):
            return self.sessions.step(request)
        delta_D = self.federation.update("s01")
        update = PrivateUpdate(self.plan.digest, {"x": delta_D.shape}, delta_D, "e" * 64)
        return self.sessions.begin(request, self.plan, self.law, mode=mode, update=update, ledger_head="")

    def requests(self, until: str) -> bytes:
        """Run a session up to a request of that kind to the product's site; the request."""
        server = self.federation.server(self.terms)
        for name in self.federation.names[1:]:
            self.federation.site(name, self.terms)
        requests = server.start()
        while decode(Signed, requests["s01"]).kind != until:
            replies = {n: self.say(r) if n == "s01" else self.federation.tell(n, r) for n, r in requests.items()}
            requests = server.advance(replies)
        return requests["s01"]

    def state(self) -> str:
        record = UpdateRecords(self.folder).get("f", 1)
        return str(record.state) if record else "absent"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "secure")


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("Offer", "absent", "new"),
        ("Admitted", "new", "uploaded"),
        ("Agreed", "uploaded", "opened"),
        ("Choice", "opened", "committed"),
    ],
)
def test_nothing_is_said_before_it_is_on_disk(
    kind: str, before: str, after: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = world.requests(kind)
    assert world.state() == before

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(secure_session, "_replace", full)
        for _ in range(2):
            with pytest.raises(TransportError, match="could not be stored"):
                world.say(request)
    assert world.state() == before
    first = world.say(request)
    assert world.state() == after
    assert world.say(request) == first, "a lost answer is repeated, not made again"


def test_every_file_is_synchronised_before_it_replaces_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return function(*args, **kwargs)

        return call

    request = world.requests("Admitted")
    monkeypatch.setattr(secure_session.os, "fsync", noted("fsync", secure_session.os.fsync))
    monkeypatch.setattr(Path, "replace", noted("replace", Path.replace))
    world.say(request)
    assert done == ["fsync", "replace", "fsync"] * 2  # the words, then the record that speaks of them
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in world.folder.glob("*/*"))


def test_a_restart_ends_the_session_and_remembers_what_was_said(world: World) -> None:
    request = world.requests("Agreed")
    world.say(request)
    world.sessions = world.restarted()
    with pytest.raises((RoundError, TrustError)):
        world.say(request)
    assert world.state() == "opened"
    with pytest.raises(PrivacyError, match="did not finish"):
        world.check(SKETCH)
    world.check(SUM_ONLY)


def test_an_offer_of_somebody_else_leaves_the_open_session_alone(world: World) -> None:
    request = world.requests("Roll")
    offer = world.federation.server(world.terms, key=new_key()).start()["s01"]
    with pytest.raises(TrustError, match="does not verify"):
        world.say(offer)
    reply = decode(Reply, world.say(request))
    assert reply.signed.kind == "Dealing"


def test_a_new_offer_ends_the_session_before_it(world: World) -> None:
    request = world.requests("Admitted")
    world.say(world.federation.server(world.terms).start()["s01"])
    with pytest.raises(TrustError, match="another transcript"):
        world.say(request)
    assert world.state() == "new"


def test_steps_without_a_session_are_refused(world: World) -> None:
    request = world.requests("Roll")
    world.sessions = world.restarted()
    with pytest.raises(RoundError, match="no session"):
        world.sessions.step(request)


def narrowed(world: World, bits: int) -> None:
    """The site's people write another width into its policy."""
    world.law = world.law.model_copy(update={"upload": world.law.upload.model_copy(update={"word_bits": bits})})
    world.sessions = world.restarted()


def upload_narrow(world: World) -> bytes:
    """Upload in words of 16 bits; the reply."""
    world.federation.mode, world.federation.word_bits = SUM_ONLY, 16
    world.terms = replace(world.federation.terms(), plan_digest=world.plan.digest)
    say = world.say
    world.say = lambda request, *, mode=SUM_ONLY: say(request, mode=mode)  # type: ignore[method-assign]
    return world.say(world.requests("Admitted"))


def test_narrow_words_are_kept_and_sent_again_as_they_were(world: World) -> None:
    narrowed(world, 16)
    first = decode(Reply, upload_narrow(world)).words
    (file,) = world.folder.glob("*/*.words")
    kept = file.read_bytes()
    assert len(first) == len(kept) == 2 * world.federation.dimension and first != kept
    world.sessions = world.restarted()
    again = decode(Reply, world.say(world.requests("Admitted"))).words
    assert file.read_bytes() == kept and again not in (first, kept)
    record = UpdateRecords(world.folder).get("f", 1)
    assert record is not None and record.uploads == 2


def test_an_update_that_was_sent_in_words_of_one_width_is_not_sent_in_another(world: World) -> None:
    narrowed(world, 16)
    upload_narrow(world)
    narrowed(world, 32)
    world.federation.word_bits = 32
    world.terms = replace(world.federation.terms(), plan_digest=world.plan.digest)
    with pytest.raises(PrivacyError, match="words of other than 32 bits"):
        world.say(world.federation.server(world.terms).start()["s01"])
    record = UpdateRecords(world.folder).get("f", 1)
    assert record is not None and record.uploads == 1


def test_the_policys_width_is_16_or_32_and_16_opens_no_sketch(world: World, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    for bits, is_law in (("16", True), ("32", True), ("8", False), ("64", False), ('"16"', False)):
        file.write_text(POLICY.format(key="ab" * 32).replace("[upload]", f"[upload]\nword_bits = {bits}"))
        assert isinstance(read_policy(file), SitePolicy) is is_law, bits
    narrowed(world, 16)
    with pytest.raises(ConfigError, match="carry mode secagg only"):
        world.check(SKETCH)
    world.check(SUM_ONLY)


def test_only_the_approved_roster(world: World) -> None:
    with pytest.raises(PrivacyError, match="approves no roster"):
        approved_members(world.plan, world.law.model_copy(update={"roster": ()}))
    other = world.law.roster[0].model_copy(update={"key": new_key().public.hex()})
    with pytest.raises(TrustError, match="another roster"):
        approved_members(world.plan, world.law.model_copy(update={"roster": (other, *world.law.roster[1:])}))
    assert [member.name for member in approved_members(world.plan, world.law)] == list(world.federation.names)


POLICY = """
[privacy]
unit = "trajectory"
epsilon_total = 8.0
delta = 1e-5

[upload]
updates = true
aggregation = ["secagg", "secagg_sketch"]

[choosing]
window = 5

[[roster]]
name = "a"
key = "{key}"
organisation = "A"
run_by_vendor = true
"""


def test_the_roster_is_part_of_the_sites_law(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY.format(key="ab" * 32))
    law = read_policy(file)
    assert isinstance(law, SitePolicy) and law.roster[0].run_by_vendor and law.choosing.window == 5
    for changed in ("ab" * 31, "AB" * 32, "zz" * 32):
        file.write_text(POLICY.format(key=changed))
        assert isinstance(read_policy(file), ServeOnly)
    for good, bad in (('"secagg"', '"clear"'), ("window = 5", "window = 0"), ("run_by_vendor", "run_by_us")):
        file.write_text(POLICY.format(key="ab" * 32).replace(good, bad))
        assert isinstance(read_policy(file), ServeOnly), bad


def test_what_the_limits_would_refuse_is_known_before_training(world: World) -> None:
    world.check(SKETCH)
    choosing = world.law.choosing.model_copy(update={"sketched_share": 0.001})
    world.law = world.law.model_copy(update={"choosing": choosing})
    with pytest.raises(PrivacyError, match=r"of an update's dimensions; 0\.1% is allowed"):
        world.check(SKETCH)
    world.check(SUM_ONLY)
