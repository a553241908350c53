"""The hub's memory of versions, transitions and evidence, in SQL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, create_engine, insert, select, update
from sqlalchemy.engine import Connection, Row
from sqlalchemy.exc import OperationalError

from common.errors import TransportError
from model_hub.evidence import Decision, PairedOutcome, Verdict
from model_hub.rollout import Stage, advance
from model_hub.version import Lineage, ModelVersion

_metadata = MetaData()
_versions = Table(
    "version",
    _metadata,
    Column("sequence", Integer, primary_key=True),
    Column("id", String(64), unique=True, nullable=False),
    Column("parent", String(64)),
    Column("digest", String(64), nullable=False),
    Column("lineage", String, nullable=False),
    Column("stage", String(16), nullable=False),
    Column("reason", String, nullable=False),
    Column("created_at_s", Float, nullable=False),
)
_transitions = Table(
    "transition",
    _metadata,
    Column("sequence", Integer, primary_key=True),
    Column("version", String(64), nullable=False),
    Column("stage", String(16), nullable=False),
    Column("reason", String, nullable=False),
    Column("at_s", Float, nullable=False),
)
_evidence = Table(
    "evidence",
    _metadata,
    Column("sequence", Integer, primary_key=True),
    Column("version", String(64), nullable=False),
    Column("at_s", Float, nullable=False),
    Column("verdict", String, nullable=False),
    Column("outcomes", String, nullable=False),
)


@dataclass(frozen=True)
class Transition:
    """One step of a version's life."""

    version: str
    stage: Stage
    reason: str
    at_s: float


@dataclass(frozen=True)
class EvidencePoint:
    """A verdict and when it was reached."""

    at_s: float
    verdict: Verdict


class Catalog:
    """Every write is one transaction."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        _metadata.create_all(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def add(self, version: ModelVersion) -> None:
        with self._transaction() as db:
            db.execute(
                insert(_versions).values(
                    id=version.id,
                    parent=version.parent,
                    digest=version.digest,
                    lineage=json.dumps(asdict(version.lineage)),
                    stage=version.stage,
                    reason=version.reason,
                    created_at_s=version.created_at_s,
                )
            )
            _log(db, version.id, version.stage, version.reason, version.created_at_s)

    def move(self, *moves: Transition) -> None:
        """Advance versions along the table of states, all or none; ValueError where there is no such arrow."""
        with self._transaction() as db:
            for move in moves:
                chosen = _versions.c.id == move.version
                current = db.execute(select(_versions.c.stage).where(chosen)).scalar_one()
                stage = advance(Stage(current), move.stage)
                db.execute(update(_versions).where(chosen).values(stage=stage, reason=move.reason))
                _log(db, move.version, stage, move.reason, move.at_s)

    def record_evidence(
        self, version_id: str, verdict: Verdict, outcomes: Mapping[str, Sequence[PairedOutcome]], *, at_s: float
    ) -> None:
        """Keep a window's outcomes by site and the verdict that followed."""
        with self._transaction() as db:
            db.execute(
                insert(_evidence).values(
                    version=version_id,
                    at_s=at_s,
                    verdict=json.dumps(asdict(verdict)),
                    outcomes=json.dumps({site: [astuple(o) for o in made] for site, made in outcomes.items()}),
                )
            )

    def outcomes(self, version_id: str) -> dict[str, list[PairedOutcome]]:
        """All outcomes a version has had, by site."""
        query = select(_evidence.c.outcomes).where(_evidence.c.version == version_id).order_by(_evidence.c.sequence)
        found: dict[str, list[PairedOutcome]] = {}
        with self._engine.connect() as db:
            for (window,) in db.execute(query):
                for site, made in json.loads(window).items():
                    found.setdefault(site, []).extend(PairedOutcome(*values) for values in made)
        return found

    def versions(self) -> list[ModelVersion]:
        """All versions in order of publication."""
        with self._engine.connect() as db:
            return [_version(row) for row in db.execute(select(_versions).order_by(_versions.c.sequence))]

    def in_stage(self, stage: Stage) -> list[ModelVersion]:
        return [version for version in self.versions() if version.stage is stage]

    def transitions(self) -> list[Transition]:
        with self._engine.connect() as db:
            rows = db.execute(select(_transitions).order_by(_transitions.c.sequence))
            return [Transition(row.version, Stage(row.stage), row.reason, row.at_s) for row in rows]

    def evidence(self, version_id: str) -> list[EvidencePoint]:
        query = select(_evidence).where(_evidence.c.version == version_id).order_by(_evidence.c.sequence)
        with self._engine.connect() as db:
            return [EvidencePoint(row.at_s, _verdict(row.verdict)) for row in db.execute(query)]

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as db:
                yield db
        except OperationalError as error:
            raise TransportError(f"the hub's catalog could not be written: {error.orig}") from error


def _verdict(text: str) -> Verdict:
    fields = json.loads(text)
    return Verdict(**{**fields, "decision": Decision(fields["decision"])})


def _log(db: Connection, version_id: str, stage: Stage, reason: str, at_s: float) -> None:
    db.execute(insert(_transitions).values(version=version_id, stage=stage, reason=reason, at_s=at_s))


def _version(row: Row[Any]) -> ModelVersion:
    lineage = json.loads(row.lineage)
    return ModelVersion(
        id=row.id,
        parent=row.parent,
        digest=row.digest,
        lineage=Lineage(**{**lineage, "participants": tuple(lineage["participants"])}),
        stage=Stage(row.stage),
        reason=row.reason,
        created_at_s=row.created_at_s,
    )
