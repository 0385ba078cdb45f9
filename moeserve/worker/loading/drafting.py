"""Sets up drafts according to --speculative-config, on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moeserve.config import ServerConfig, drafts_of, num_drafts
from moeserve.errors import ConfigError
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import Drafter, LateDrafts, Reading
from moeserve.worker.drafts.drafting import Drafting
from moeserve.worker.drafts.made_drafter import make_drafter
from moeserve.worker.drafts.next_token_drafter import LEAST_PROBABILITY, DraftingBlock
from moeserve.worker.drafts.run_sampler import DraftingEngine
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Sequences


def drafting_of(
    config: ServerConfig,
    engine: DraftingEngine,
    block: DraftingBlock | None,
    constraints: Constraints,
    *,
    small_model: Callable[[Sequences], Drafter] | None = None,
    reading: Reading | None = None,
    most: int | None = None,
    late: LateDrafts | None = None,
    keeping: Keeping | None = None,
    rotary: RotaryPositions | None = None,
) -> Drafting | None:
    """Returns the drafting parts; None if drafts are off. block: the model's next-token block, or an EAGLE-3
    head; None if there is none on this device. small_model: makes the drafter of --speculative-model, which notes in
    `reading` what it reads. most: drafts of a step; None: as many as the router grants. late, keeping: where
    small_model's drafter notes drafts that a GPU is still computing, and what it spends without drafts. rotary:
    see `make_drafter`."""
    drafts = drafts_of(config)
    if drafts is None:
        return None
    keeping = Keeping() if keeping is None else keeping
    drafter = partial(
        make_drafter,
        drafts=drafts,
        block=block,
        constraints=constraints,
        shares_texts=config.prefix_cache != "off",
        small_model=small_model,
        least_probability=least_probability(config),
        keeping=keeping,
        rotary=rotary,
    )
    return Drafting(engine, drafter, Reading() if reading is None else reading, keeping, most, late)


def least_probability(config: ServerConfig) -> float:
    """Returns the least probability that the model's own block must give a draft for it to be verified. 0 for dummy
    weights, whose drafts are all improbable: benchmarks time them."""
    return 0.0 if config.load_format == "dummy" else LEAST_PROBABILITY


def refuse_records_of_drafts(config: ServerConfig) -> None:
    """Raises ConfigError for drafts together with the recording of steps, whose rows would include drafts."""
    for flag, value in (
        ("--debug-dump", config.debug_dump),
        ("--record-routing-trace", config.record_routing_trace),
    ):
        if num_drafts(config) and value is not None:
            raise ConfigError(
                f"{flag} cannot be combined with drafts: leave it out, or leave out --speculative-config and "
                "--speculative-model"
            )
