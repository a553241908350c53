"""Live progress of a simulation in the terminal; plain lines where there is no terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aggregator.round_log import RoundRecord
from deploy.settings import SimulationSettings
from deploy.world import Exam


class Terminal:
    """A table of the sites that is redrawn in place, and a line for every round."""

    def __init__(self, settings: SimulationSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._stage = "setting up"
        self._exams: list[Exam] = []
        self._round = 0
        self._refused: dict[str, str] = {}
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Terminal:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def stage(self, text: str) -> None:
        if text == self._stage:
            return
        self._stage = text
        if self._console.is_terminal:
            self._live.update(self._draw())
        else:
            self._console.print(text, markup=False, highlight=False)

    def round_ended(self, record: RoundRecord) -> None:
        self._round = record.number
        self._refused = {refusal.site: refusal.reason for refusal in record.refused}
        result = f"{record.version} is {record.stage}" if record.version else f"voided: {record.void_reason}"
        self._console.print(
            f"round {record.number}/{self._settings.rounds}: {len(record.participants)} sites combined, {result}",
            markup=False,
            highlight=False,
        )
        for refusal in record.refused:
            self._console.print(f"  refused {refusal.site} at {refusal.stage}: {refusal.reason}", markup=False)

    def exam_held(self, exam: Exam) -> None:
        self._exams.append(exam)
        self._console.print(
            f"  held-out reward {exam.mean_reward:.3f}, "
            + (
                "NO PRIVACY"
                if self._settings.unsafe_no_dp
                else f"epsilon {exam.largest_epsilon:.2f} of {self._settings.epsilon:g}"
            ),
            markup=False,
            highlight=False,
        )
        if self._console.is_terminal:
            self._live.update(self._draw())

    def _epsilon(self, site: str) -> Text | str:
        if self._settings.unsafe_no_dp:
            return Text("none", "red")
        return f"{self._exams[-1].epsilons[site]:.2f}" if self._exams else "…"

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("site", "reward", "epsilon", "last round"):
            table.add_column(column)
        for site in self._settings.site_names:
            rewards = [exam.reward_of(site) for exam in self._exams]
            table.add_row(
                site,
                " → ".join(f"{reward:.2f}" for reward in rewards) or "…",
                self._epsilon(site),
                self._last_round(site),
            )
        heading = f"{self._round} of {self._settings.rounds} rounds done, {self._settings.how}"
        return Group(Text(heading), table, Text(self._stage, "bold"))

    def _last_round(self, site: str) -> Text | str:
        if site in self._refused:
            return Text(f"refused: {self._refused[site][:60]}", "red")
        return "combined" if self._round else "…"
