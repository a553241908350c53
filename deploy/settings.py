"""Settings of a simulated federation, checked as a whole before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from aggregator.federation import check_rule
from aggregator.rules import default_rule
from aggregator.server_optimizer import ServerOptimizer
from common.config import Section
from common.errors import ConfigError
from common.inference.model_folder import EMBEDDED
from common.plan import Training
from common.secagg.context import MINIMUM_SITES as MINIMUM_SITES_OF
from common.secagg.context import SKETCH, SUM_ONLY, check_word_bits
from deploy.attacks import ATTACKS, Attack, parse_attack
from deploy.attacks.poisoning import backdoor
from edge_node.config import LoraSettings
from edge_node.config import TrainingSettings as EdgeTrainingSettings
from edge_node.training.objectives import GROUP_SIZE, OBJECTIVES, objective_of
from edge_node.training.units import ExampleKind

QUICK: dict[str, Any] = {
    "rounds": 2,
    "requests_per_round": 250,
    "exam_problems": 50,
    "training": {"nominal_units": 165.0, "learning_rate": 40.0},
}
"""What `--quick` changes: about a minute."""

_SITES_FOR_SKETCHES = 6
"""From which one may be excluded and another one be late."""

PROFILES: dict[str, dict[str, Any]] = {
    "dp": {},
    "source": {
        "lora": {"rank": 8, "alpha": 32.0},
        "physical_batch": 16,
        "training": {
            "optimizer": "adam",
            "learning_rate": 1e-5,
            "steps": 4,
            "sampling_rate": 64 / 270,
            "lora_dropout": 0.1,
        },
    },
}
"""`dp` is what is measured to work under differential privacy. `source` keeps the numbers of the design this project
started from: rank 8, alpha 32, dropout 0.1, learning rate 1e-5, batches of 16 accumulated 4 times, 100 samples."""


class TrainingSettings(Section):
    """Public hyper-parameters; the defaults are measured to work with DPO at epsilon 8.

    Attributes:
        nominal_units: units a site is expected to have; fixes the divisor, never a count.
        hyperparameters: of the objective, beside its defaults.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    steps: Annotated[int, Field(ge=1)] = 2
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    nominal_units: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 270.0
    unit_clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    hyperparameters: dict[str, float] = Field(default_factory=dict)

    def plan(self, algorithm: str) -> Training:
        return Training(
            objective=algorithm,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            expected_batch=self.sampling_rate * self.nominal_units,
            unit_clip_norm=self.unit_clip_norm,
            hyperparameters=objective_of(algorithm, self.hyperparameters)[1],
            lora_dropout=self.lora_dropout,
        )


class ServerSettings(Section):
    """What the server makes of a round's combined change; see `aggregator.server_optimizer`."""

    optimizer: Literal["average", "fedavgm", "fedadam"] = "average"
    learning_rate: float = 1.0
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    @model_validator(mode="after")
    def _possible(self) -> ServerSettings:
        try:
            self.plan()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def plan(self) -> ServerOptimizer:
        return ServerOptimizer(self.optimizer, self.learning_rate, self.beta_1, self.beta_2, self.tau)


class SimulationSettings(Section):
    """One simulated federation.

    Attributes:
        attack: NAME:K, how many sites do what no honest site would; `none` for none.
        drop, slow: probability that a site is away in a round, in a secure mode in a window of rounds, or too slow for
            it; see `deploy.absences`.
        collect_timeout_s: real seconds a round waits for its sites.
        rule: how updates are combined; empty picks by the number of sites.
        aggregation: sealed, or what the aggregator may know in place of each update; see docs/leakage.md. Empty for
            sketches where they can do the work, see `mode`.
        word_bits: of a masked number; 16 halves the uploads of aggregation secagg.
        reference: whether whoever runs the aggregator trains on public data beside the sites and leaves out updates
            that point the other way; see `deploy.reference`.
        requests_per_round: of the users of one site, two answers each.
        exam_problems: held-out problems by which each site's reward is measured.
        exam_every: rounds from one measurement to the next; the last round is always measured.
        clip_norm: L2 bound of one site's update.
        drills: publish two bad versions at the end, to see the canary catch them.
        unit: of privacy; every simulated user asks once a round, so both units have about the same size here.
        lora_mode, balance, patience: see `aggregator.federation.Federation`.
        min_samples, physical_batch: see `edge_node.config.TrainingSettings`.
    """

    sites: Annotated[int, Field(ge=1, le=1000)] = 6
    rounds: Annotated[int, Field(ge=1, le=1000)] = 5
    algorithm: str = "dpo"
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    unsafe_no_dp: bool = False
    attack: str = "scale:1"
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    slow: Annotated[float, Field(ge=0, lt=1)] = 0.0
    collect_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    rule: str = ""
    aggregation: Literal["", "sealed", "secagg", "secagg_sketch"] = ""
    word_bits: Literal[16, 32] = 32
    reference: bool = True
    grid: Literal["local", "ray"] = "local"
    seed: int = 0
    model: Path = EMBEDDED
    requests_per_round: Annotated[int, Field(ge=1)] = 400
    exam_problems: Annotated[int, Field(ge=2)] = 100
    exam_every: Annotated[int, Field(ge=1)] = 1
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    drills: bool = True
    unit: Literal["trajectory", "user"] = "trajectory"
    lora_mode: Literal["alternate", "ffa"] = "alternate"
    balance: bool = False
    patience: Annotated[int, Field(ge=0)] = 0
    min_samples: Annotated[int, Field(ge=0)] = 100
    physical_batch: Literal["auto"] | Annotated[int, Field(ge=1)] = 64
    lora: LoraSettings = LoraSettings()
    training: TrainingSettings = TrainingSettings()
    server: ServerSettings = ServerSettings()

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, algorithm: str) -> str:
        if algorithm not in OBJECTIVES:
            raise ValueError(f"not one of the objectives: {', '.join(sorted(OBJECTIVES))}")
        return algorithm

    @field_validator("attack")
    @classmethod
    def _known_attack(cls, attack: str) -> str:
        parse_attack(attack)
        return attack

    @model_validator(mode="after")
    def _enough_sites(self) -> SimulationSettings:
        try:
            check_rule(self.rule_name, sites=self.sites)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        needed = MINIMUM_SITES_OF.get(self.mode, 0)
        if self.sites < needed:
            raise ValueError(f"aggregation {self.mode} needs at least {needed} sites")
        try:
            check_word_bits(self.word_bits, mode=self.mode, total_weight=self.sites)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.mode != "sealed" and self.grid != "local":
            raise ValueError("a site's secure session lives in one process: use grid = local")
        if self.attackers >= self.sites:
            raise ValueError(f"{self.attackers} of {self.sites} sites attack; at least one must be honest")
        if self.balance and self.server.plan().remembers:
            raise ValueError("balancing changes the factors under the server's moments; switch balance off")
        if self.drop + self.slow >= 1:
            raise ValueError(f"drop + slow = {self.drop + self.slow:g}; together they must be below 1")
        if self.drop + self.slow > 0 and self.grid != "local":
            raise ValueError("drop and slow need grid = local")
        poisons = self.method is not None and self.method.poison is not None
        if poisons and OBJECTIVES[self.algorithm].off_policy:
            raise ValueError(f"attack {self.attack_name} imports its records, which {self.algorithm} cannot learn from")
        return self

    @property
    def edge_training(self) -> EdgeTrainingSettings:
        return EdgeTrainingSettings(min_samples=self.min_samples, physical_batch=self.physical_batch)

    @property
    def answers_per_request(self) -> int:
        """What the objective compares: a group of answers, or two."""
        objective, hyperparameters = objective_of(self.algorithm, self.training.hyperparameters)
        return int(hyperparameters[GROUP_SIZE]) if objective.kind == "groups" else 2

    @property
    def kind(self) -> ExampleKind:
        """What the objective learns from."""
        return OBJECTIVES[self.algorithm].kind

    @property
    def thumbs(self) -> bool:
        """Whether users rate the answers they get."""
        return self.kind == "thumbs"

    @property
    def rule_name(self) -> str:
        return self.rule or default_rule(self.sites)

    @property
    def mode(self) -> str:
        """How updates travel and combine: as asked for, or in sketches.

        Not where these are no use or say less than they seem to: with few sites nothing can be excluded, a rule that
        was named works on updates, a site that was away once is out of ten rounds, Ray has no process for a session,
        and without noise a sketch shows each update.
        """
        plain = not (self.rule or self.drop or self.slow or self.unsafe_no_dp) and self.grid == "local"
        return self.aggregation or (SKETCH if plain and self.sites >= _SITES_FOR_SKETCHES else "sealed")

    @property
    def how(self) -> str:
        """For people."""
        return f"sealed, rule {self.rule_name}" if self.mode == "sealed" else self.mode

    @property
    def has_reference(self) -> bool:
        """Whether anybody would look at one: where only a sum is seen, nothing is left out."""
        return self.reference and self.mode != SUM_ONLY

    @property
    def attack_name(self) -> str:
        return self.attack.partition(":")[0]

    @property
    def method(self) -> Attack | None:
        """What the hostile sites do; None where there are none."""
        return ATTACKS.get(self.attack_name)

    @property
    def has_backdoor(self) -> bool:
        return self.method is not None and self.method.poison is backdoor

    @property
    def attackers(self) -> int:
        attack = parse_attack(self.attack)
        return attack[1] if attack else 0

    @property
    def site_names(self) -> list[str]:
        return [f"site-{number}" for number in range(1, self.sites + 1)]

    def attack_of(self, site: str) -> str | None:
        """The last sites attack."""
        return self.attack_name if site in self.site_names[self.sites - self.attackers :] else None
