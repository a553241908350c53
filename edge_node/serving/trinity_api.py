"""The training contract that AgentScope's training runner and Trinity's client speak, beside the OpenAI API.

| path | says |
|---|---|
| `POST /feedback` | how good the answers `msg_ids` were, by an agent's reward or a user's rating; response ids |
| `POST /commit` | nothing more will be said about some answers |
| `POST /mark` | learn from these answers (not part of Trinity's contract) |
| `GET /health` | the node is there |

Each answers `{"status": "success"}`, or with an error of the OpenAI form.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from starlette.concurrency import run_in_threadpool

from common.errors import PrivacyError, TransportError
from edge_node.collecting.contract import About, RewardGiven, TrainingContract, UnknownAnswer
from edge_node.marking import Identifier, Labels, MarkFields
from edge_node.serving.errors import PERMISSION, ApiError, unavailable
from edge_node.serving.keys import FEEDBACK, Caller, require

MOST_IDS = 256

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Ids = Annotated[list[Identifier], Field(min_length=1, max_length=MOST_IDS)]
_May = Annotated[Caller, Depends(require(FEEDBACK))]
_JAVA_MILLISECONDS = 1e11


class _Work(BaseModel):
    """Null and absent are the same, as Java's clients write it; a run may be a number, as Python's do."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task_id: Identifier | None = None
    run_id: Identifier | StrictInt | None = None

    @property
    def task(self) -> str:
        return self.task_id or ""

    @property
    def run(self) -> str:
        return "" if self.run_id is None else str(self.run_id)


class FeedbackRequest(_Work):
    """`reward` is clipped to the site's bounds; without one, and without a rating, the answers get the site's default.

    Not part of Trinity's contract: `rating`, what a user thinks (-1 ... 1, a thumb is -1 or 1), in place of a reward;
    a later one replaces it. `labels` are kept where the answers still wait to be selected.
    """

    msg_ids: _Ids
    reward: _Number | None = None
    rating: Annotated[_Number, Field(ge=-1, le=1)] | None = None
    labels: Labels | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> FeedbackRequest:
        if self.rating is not None and (self.reward is not None or self.labels):
            raise ValueError("a rating comes by itself; send reward and labels in another message")
        return self


class CommitRequest(_Work):
    """Which records are complete; all of this key's where nothing is named.

    `time_threshold`: those collected until then; seconds since the epoch, or milliseconds, as Java's clock has them.
    """

    time_threshold: Annotated[_Number, Field(ge=0)] | None = None

    @property
    def until_s(self) -> float | None:
        at = self.time_threshold
        return at / 1000 if at is not None and at >= _JAVA_MILLISECONDS else at


class MarkRequest(MarkFields):
    """A mark for answers that were given already."""

    msg_ids: _Ids


class Success(BaseModel):
    """What every message of the contract is answered with."""

    status: Literal["success"] = "success"


def router(contract: TrainingContract) -> APIRouter:
    """The paths of the contract; `contract` takes what they say."""
    paths = APIRouter(tags=["training"])

    @paths.post("/feedback")
    async def feedback(body: FeedbackRequest, caller: _May) -> Success:
        about = About(body.msg_ids, caller.id, body.task, body.run)
        if body.rating is not None:
            return await _said(contract.rate, about, body.rating)
        return await _said(contract.reward, about, body.reward, labels=tuple(body.labels or ()))

    @paths.post("/mark")
    async def mark(body: MarkRequest, caller: _May) -> Success:
        mark = body.mark()
        return await _said(contract.mark, About(body.msg_ids, caller.id, mark.task_id, mark.run_id), mark)

    @paths.post("/commit")
    async def commit(caller: _May, body: CommitRequest | None = None) -> Success:
        said = body or CommitRequest()
        return await _said(contract.commit, key_id=caller.id, task_id=said.task, run_id=said.run, until_s=said.until_s)

    @paths.get("/health")
    async def health() -> Success:
        return Success()

    return paths


async def _said(take: Any, *arguments: Any, **named: Any) -> Success:
    """Take it on a thread, because it reads and writes the store; what fails as an error of the API."""
    try:
        await run_in_threadpool(take, *arguments, **named)
    except UnknownAnswer as error:
        raise ApiError(404, str(error), param="msg_ids", code="response_not_found") from error
    except RewardGiven as error:
        raise ApiError(409, str(error), param="reward", code="reward_already_given") from error
    except PrivacyError as error:
        reason = error.public or "this site's policy does not allow it"
        raise ApiError(403, reason, code="collecting_not_allowed", kind=PERMISSION) from error
    except TransportError as error:
        raise unavailable("not stored; say it again in a moment") from error
    return Success()
