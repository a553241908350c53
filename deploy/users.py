"""Simulated users: they talk to a node through its HTTP API with the `openai` client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from fastapi import FastAPI
from openai import AsyncOpenAI, DefaultAsyncHttpx2Client, InternalServerError
from openai.types.chat import ChatCompletion

from common.tasks import math as task

CONCURRENT_USERS = 64
MAX_ANSWER_TOKENS = 48

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reply:
    """What a user got: the response's id and the text of each choice; none where it failed."""

    id: str
    texts: tuple[str, ...]


def ask_all(app: FastAPI, problems: list[task.Problem], *, model: str, answers: int, seed: int) -> list[Reply]:
    """Replies to every problem."""

    async def ask(client: AsyncOpenAI, index: int) -> Reply:
        completion = await _complete(
            client,
            problems[index].prompt,
            model=model,
            answers=answers,
            seed=seed + index * answers,
            user=f"user-{index}",
        )
        if completion is None:
            return Reply("", ())
        return Reply(completion.id, tuple(choice.message.content or "" for choice in completion.choices))

    return asyncio.run(_all(app, ask, len(problems)))


async def _complete(
    client: AsyncOpenAI, prompt: str, *, model: str, answers: int, seed: int, user: str
) -> ChatCompletion | None:
    try:
        return await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            n=answers,
            temperature=1.0,
            max_tokens=MAX_ANSWER_TOKENS,
            seed=seed,
            user=user,
        )
    except InternalServerError:  # the node's failure, which a user lives with; a refused request is our mistake
        return None


async def _all(app: FastAPI, ask: Callable[[AsyncOpenAI, int], Awaitable[Result]], count: int) -> list[Result]:
    transport = httpx2.ASGITransport(app=app)
    async with (
        DefaultAsyncHttpx2Client(transport=transport) as http,
        AsyncOpenAI(base_url="http://site/v1", api_key="unused", http_client=http, max_retries=0) as client,
    ):
        free = asyncio.Semaphore(CONCURRENT_USERS)

        async def one(index: int) -> Result:
            async with free:
                return await ask(client, index)

        return list(await asyncio.gather(*(one(index) for index in range(count))))


def rewards(problems: Iterable[task.Problem], replies: Iterable[Reply]) -> list[float]:
    """Mean reward of each problem's answers; 0 where there is none."""
    return [
        sum(task.score_answer(problem, text).total for text in reply.texts) / len(reply.texts) if reply.texts else 0.0
        for problem, reply in zip(problems, replies, strict=True)
    ]


def right_answers(problems: Iterable[task.Problem], replies: Iterable[Reply]) -> float:
    """Share of all answers that end with the right result."""
    right = [
        task.score_answer(problem, text).answer
        for problem, reply in zip(problems, replies, strict=True)
        for text in reply.texts
    ]
    return sum(right) / max(1, len(right))


def thumbs(problem: task.Problem, reply: Reply) -> list[tuple[str, float]]:
    """A user's thumb on each choice: up where the final answer is right. By the node's id of the choice."""
    several = len(reply.texts) > 1
    return [
        (f"{reply.id}-{index}" if several else reply.id, 1.0 if task.score_answer(problem, text).answer else -1.0)
        for index, text in enumerate(reply.texts)
    ]
