"""Each attack does what its name says, and the aggregator's checks see what they can."""

from __future__ import annotations

import numpy as np
import pytest

from common.adapter import parse_tensors
from common.errors import RoundError
from common.update import NORM_TOLERANCE, LedgerHead, PrivateUpdate, open_update, seal_bytes
from deploy.attacks import ATTACKS
from tests.common.test_update import SEALING, SHAPES, SITE, plan, tensors, update

CURRENT = plan()
HONEST: PrivateUpdate = update(CURRENT.digest, tensors(0.3))


def opened(attack: str) -> np.ndarray:
    payload = ATTACKS[attack](HONEST, CURRENT)
    head = LedgerHead.signed(1, "e" * 64, SITE).encode()
    sealed = seal_bytes(payload, CURRENT, site="site-1", key=SITE, ledger_entry="e" * 64, ledger_head=head)
    return open_update(sealed, CURRENT, SHAPES, site_public=SITE.public, key=SEALING)


@pytest.mark.parametrize(
    ("attack", "reason"), [("scale", "norm 20 exceeds"), ("nan", "not finite"), ("garbage", "not a safetensors")]
)
def test_out_of_bounds_attacks_are_refused(attack: str, reason: str) -> None:
    with pytest.raises(RoundError, match=reason):
        opened(attack)


def test_a_sign_flip_is_inside_every_bound_of_one_update() -> None:
    np.testing.assert_array_equal(opened("sign-flip"), -HONEST.delta_D)


def test_scaling_turns_the_update_around() -> None:
    sent = parse_tensors(ATTACKS["scale"](HONEST, CURRENT))
    flat = np.concatenate([sent[n].reshape(-1) for n in SHAPES])
    assert np.dot(flat, HONEST.delta_D) < 0
    assert np.linalg.norm(flat) > CURRENT.clip_norm * NORM_TOLERANCE
