"""Any order of sessions, crashes and replies: one look at an update, one sum, few repetitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PrivacyError
from common.secagg import SKETCH, SUM_ONLY, Terms, UpdateState, states
from common.secagg.states import NEXT, SESSIONS, UPLOADS
from tests.common.secagg.federation import Federation

FEDERATION = Federation(4)
TERMS: dict[str, Terms] = {mode: FEDERATION.terms(mode=mode) for mode in (SKETCH, SUM_ONLY)}
UPDATE_D = FEDERATION.update("s01")
WORDS_D = np.arange(10, dtype=np.uint32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "upload", "open", "commit"]), st.sampled_from([SKETCH, SUM_ONLY]))))
def test_no_order_of_steps_opens_twice_or_sends_what_is_spent(steps: list[tuple[str, str]]) -> None:
    record = states.new_record(TERMS[SKETCH], UPDATE_D)
    opened = committed = uploads = 0
    for number, (step, mode) in enumerate(steps):
        before = record
        try:
            if step == "begin":
                record = states.begin(record, TERMS[mode], number.to_bytes(32), UPDATE_D)
            elif step == "upload":
                record = states.upload(record, TERMS[mode], WORDS_D)
                assert not committed and not (opened and mode == SKETCH)
                uploads += 1
            elif step == "open":
                record = states.open_sketch(record, TERMS[mode])
                assert uploads and not committed
                opened += 1
            else:
                record = states.commit_to(record, ("s01", "s02", "s03"))
                assert uploads
                committed += 1
        except PrivacyError:
            assert record is before
        assert opened <= 1 and committed <= 1 and uploads <= UPLOADS and len(record.sessions) <= SESSIONS
        assert record.state == before.state or record.state in NEXT[before.state]


def test_a_repetition_sends_the_stored_words() -> None:
    record = states.upload(states.new_record(TERMS[SKETCH], UPDATE_D), TERMS[SKETCH], WORDS_D)
    assert states.upload(record, TERMS[SKETCH], WORDS_D).uploads == 2
    with pytest.raises(PrivacyError, match="not those that were sent before"):
        states.upload(record, TERMS[SKETCH], WORDS_D + np.uint32(1))


def test_sessions_are_counted_and_never_repeated() -> None:
    record = states.new_record(TERMS[SKETCH], UPDATE_D)
    for number in range(SESSIONS):
        record = states.begin(record, TERMS[SKETCH], number.to_bytes(32), UPDATE_D)
        with pytest.raises(PrivacyError, match="opened before"):
            states.begin(record, TERMS[SKETCH], number.to_bytes(32), UPDATE_D)
    with pytest.raises(PrivacyError, match="16 sessions"):
        states.begin(record, TERMS[SKETCH], b"x" * 32, UPDATE_D)


@pytest.mark.parametrize("field", ["federation", "round", "plan_digest", "update_sha256"])
def test_a_round_has_one_update(field: str) -> None:
    record = replace(states.new_record(TERMS[SKETCH], UPDATE_D), **{field: 2 if field == "round" else "other"})
    with pytest.raises(PrivacyError, match="another update already"):
        states.begin(record, TERMS[SKETCH], bytes(32), UPDATE_D)


def test_nothing_follows_a_commitment() -> None:
    assert NEXT[UpdateState.COMMITTED] == frozenset()
    assert all(UpdateState.NEW not in following for following in NEXT.values())
