"""Fail closed: without a valid policy a node serves, and neither collects nor trains nor uploads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.plan import make_plan
from common.errors import PrivacyError
from common.identity import SealingKey
from common.plan import sign_plan
from common.tasks import math as task
from deploy.users import Reply, ask_all
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.policy import PolicyFile, ServeOnly, SitePolicy, read_policy

VALID = """\
[privacy]
unit = "trajectory"
epsilon_total = 8.0
delta = 1e-5
[upload]
updates = true
aggregation = ["sealed"]
"""

INVALID = {
    "empty": ("", "privacy is missing"),
    "not toml": ("[privacy", "not TOML"),
    "no epsilon": (VALID.replace("epsilon_total = 8.0\n", ""), "privacy.epsilon_total is missing"),
    "no delta": (VALID.replace("delta = 1e-5\n", ""), "privacy.delta is missing"),
    "no unit": (VALID.replace('unit = "trajectory"\n', ""), "privacy.unit is missing"),
    "zero epsilon": (VALID.replace("8.0", "0"), "epsilon_total"),
    "negative epsilon": (VALID.replace("8.0", "-1"), "epsilon_total"),
    "infinite epsilon": (VALID.replace("8.0", "inf"), "epsilon_total"),
    "nan epsilon": (VALID.replace("8.0", "nan"), "epsilon_total"),
    "delta one": (VALID.replace("1e-5", "1"), "delta"),
    "unknown unit": (VALID.replace('"trajectory"', '"week"'), "unit"),
    "unknown key": (VALID + "everything = true\n", "unknown key 'upload.everything'"),
    "misspelled section": (VALID + "[redactoin]\n", "did you mean 'redaction'"),
    "no upload": (VALID[: VALID.index("[upload]")], "upload is missing"),
    "unknown mode": (VALID.replace('"sealed"', '"clear"'), "aggregation"),
    "pattern overflow": (VALID + '[redaction]\npatterns = { x = "a{99999999999999999999}" }\n', "not a usable regular"),
    "pattern clash": (VALID + '[redaction]\npatterns = { password = "x" }\n', "names two redaction rules"),
    "field clash": (VALID + '[redaction]\nfields = ["email"]\n', "names two redaction rules"),
    "field twice": (VALID + '[redaction]\nfields = ["pin", "pin"]\n', "names two redaction rules"),
    "huge number": (VALID.replace("8.0", "9" * 5000), "cannot be read"),
    "deep nesting": (VALID + "[redaction]\nfields = " + "[" * 5000 + "]" * 5000 + "\n", "cannot be read"),
    "bad pattern": (VALID + '[redaction]\npatterns = { phone = "(" }\n', "not a usable regular expression"),
    "no retention": (VALID + "[collection]\nretention_days = 0\n", "retention_days"),
}


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_valid_policy_is_read(tmp_path: Path) -> None:
    policy = read_policy(write(tmp_path / "policy.toml", VALID))
    assert isinstance(policy, SitePolicy)
    assert policy.privacy.epsilon_total == 8.0
    assert policy.redaction.fields == ("password", "token")


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_policy_allows_nothing_and_says_why(tmp_path: Path, name: str) -> None:
    text, expected = INVALID[name]
    policy = read_policy(write(tmp_path / "policy.toml", text))
    assert isinstance(policy, ServeOnly)
    assert expected in policy.reason


def test_a_policy_that_others_could_change_is_refused(tmp_path: Path) -> None:
    for mode in (0o664, 0o646):
        policy = read_policy(write(tmp_path / "policy.toml", VALID, mode))
        assert isinstance(policy, ServeOnly)
        assert "others could change it" in policy.reason


def test_a_policy_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "policy.toml", VALID)
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    os.chown(path, 65534, 65534)
    policy = read_policy(path)
    assert isinstance(policy, ServeOnly)
    assert "another user" in policy.reason


def test_a_refusal_does_not_carry_the_policys_text(tmp_path: Path) -> None:
    path = write(tmp_path / "policy.toml", VALID + '[redaction]\npatterns = { p = "Project Falcon (" }\n')
    with pytest.raises(PrivacyError) as error:
        PolicyFile(path).law()
    assert "Falcon" not in error.value.public


def test_missing_or_unreadable_is_serve_only(tmp_path: Path) -> None:
    assert read_policy(tmp_path / "absent.toml") == ServeOnly("absent.toml is missing")
    (tmp_path / "folder.toml").mkdir()
    assert isinstance(read_policy(tmp_path / "folder.toml"), ServeOnly)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert isinstance(read_policy(tmp_path / "binary.toml"), ServeOnly)


def test_a_change_on_disk_takes_effect_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "policy.toml", VALID)
    policy = PolicyFile(path)
    assert policy.law().privacy.epsilon_total == 8.0
    write(path, VALID.replace("8.0", "2.5"))
    assert policy.law().privacy.epsilon_total == 2.5
    path.unlink()
    with pytest.raises(PrivacyError, match="only serves"):
        policy.law()
    write(path, VALID)
    assert policy.law()
    path.chmod(0o666)
    with pytest.raises(PrivacyError):
        policy.law()
    path.chmod(0o644)
    assert policy.law()
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(PrivacyError):
            policy.law()


def answers(node: EdgeNode) -> list[Reply]:
    problems = [task.Problem(23, "+", 45), task.Problem(77, "-", 31)]
    return ask_all(node.app, problems, model="headwater", answers=2, seed=1)


def stored(node: EdgeNode) -> int:
    return len(list(node.store.read(after_s=0, until_s=4e9)))


@pytest.mark.parametrize("broken", ["missing", "invalid", "collection off", "upload off"])
def test_a_node_without_permission_serves_and_does_nothing_else(world: World, node: EdgeNode, broken: str) -> None:
    policy = world.setups[0].config.policy
    if broken == "missing":
        policy.unlink()
    else:
        text = {
            "invalid": "[privacy]\nepsilon_total = -1\n",
            "collection off": VALID + "[collection]\nenabled = false\n",
            "upload off": VALID.replace("updates = true", "updates = false"),
        }[broken]
        write(policy, text)
    assert all(len(reply.texts) == 2 for reply in answers(node))
    assert stored(node) == (4 if broken == "upload off" else 0)
    plan = make_plan(
        world.federation,
        world.hub.stable,
        world.hub.adapter("v0"),
        number=1,
        sealing_key=SealingKey(X25519PrivateKey.generate()),
        now_s=world.clock(),
    )
    if broken != "collection off":
        with pytest.raises(PrivacyError):
            node.sealed_update(plan.payload, sign_plan(plan, world.federation.key), "")
        assert node.training.ledger.charges() == []
        assert list((world.setups[0].config.data_dir / "updates").iterdir()) == []


def test_a_node_with_a_policy_collects(node: EdgeNode) -> None:
    answers(node)
    assert stored(node) == 4
