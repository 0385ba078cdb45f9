"""The front's record of one model, and the protocols of its server and of the processes around it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from moeserve.front.config import ServedModel
from moeserve.front.memory import Memory
from moeserve.front.schedule import ScheduledModel, State
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal

FIRST_BACKOFF_S: Final = 5.0  # wait after a failed load; doubles with each further failure in a row
MAX_BACKOFF_S: Final = 300.0
MAX_DOUBLINGS: Final = 10

log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """A model cannot be loaded; the message is the reason, for clients and the log."""

    def __init__(self, reason: str, *, is_crash: bool = False) -> None:
        """is_crash: its server ended by itself, without saying why."""
        super().__init__(reason)
        self.is_crash = is_crash


@contextlib.contextmanager
def errors_as_failures() -> Iterator[None]:
    """Makes an error of this server a LoadFailed, so that it leaves no request waiting."""
    try:
        yield
    except LoadFailed:
        raise
    except Exception as error:
        log.exception("a load failed by an error of this server")
        raise LoadFailed(f"{type(error).__name__}: {error}") from error


class Instance(Protocol):
    """One model's running server."""

    is_answering: bool  # False while it answers nothing, because a process of it is stopped or lost
    died_by_itself: bool  # of a server that has ended: False if it was killed or stopped from outside

    @abstractmethod
    async def until_ready(self, tell: Callable[[str, float], None]) -> None:
        """Waits until the model is loaded. Calls `tell` with the loading stage and the stage's fraction, 0 to 1. Raises
        LoadFailed."""

    @abstractmethod
    async def until_ended(self) -> str:
        """Waits until the server ends by itself, and returns the reason."""

    @abstractmethod
    async def is_ready(self) -> bool:
        """Asks the server whether it takes requests now."""

    @abstractmethod
    async def stop(self) -> None:
        """Stops the server if it runs. Running requests end first, within its drain time."""


@dataclass(frozen=True)
class Needs:
    memory: Memory  # RAM; and on no GPU
    gpus: tuple[int, ...] = ()  # bytes of each GPU that it takes; empty: it runs on the CPU
    gpu_choices: tuple[int, ...] = ()  # numbers of the GPUs that these may be
    max_model_len: int | None = None  # tokens of a request
    overrides: dict[str, Any] = field(default_factory=dict)  # options that keep the model within that memory
    facts: dict[str, str] = field(default_factory=dict)  # architecture, size, quantization
    gpus_there: tuple[int, ...] = ()  # bytes of each GPU's memory that the models may share, by number
    completed: dict[str, Any] = field(
        default_factory=dict
    )  # options that were open until the files were there


class Surroundings(Protocol):
    """The processes around the pool."""

    @abstractmethod
    async def measure(self, model: PooledModel) -> Needs:
        """Returns the memory that the model needs. Raises LoadFailed."""

    @abstractmethod
    async def signature(self, model: PooledModel) -> Any:
        """Returns a value that changes when the model's file changes; None without a file. Raises LoadFailed if the
        file's file system does not answer."""

    @abstractmethod
    def start(self, model: PooledModel) -> Instance:
        """Starts the model's server. Raises LoadFailed."""


@dataclass(eq=False)
class PooledModel(ScheduledModel):
    served: ServedModel = None  # type: ignore[assignment]  # required, but a field after defaults must have one
    place: int = 0
    usual_idle_limit: float | None = None  # seconds; `idle_limit` where no request has asked for another
    gpus: tuple[int, ...] = ()  # numbers of its GPUs
    needs: Needs | None = None
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that clients have loaded
    signature: Any = None  # of the file whose needs are known
    failure: str = ""  # why the last load, or reading the file, failed
    failures: int = 0  # in a row
    crashes: int = 0  # in a row: servers that ended by themselves during their load or soon after it
    is_too_large: bool = False  # the model needs more than the memory of all models together
    is_removed: bool = False  # requests can no longer name the model
    instance: Instance | None = None
    stage: str = ""  # of the model's load
    fraction: float = 0.0
    loaded_at: float = 0.0  # when the last load began or ended
    tickets: deque[Ticket] = field(default_factory=deque)
    line_tickets: deque[Ticket] = field(default_factory=deque)  # of lines of batches
    # Set while lines must leave the model's server, because it is about to end.
    sends_lines_back: asyncio.Event = field(default_factory=asyncio.Event)
    num_loads: int = 0
    num_failures: int = 0
    num_evictions: int = 0  # times that it was unloaded to make room for others
    num_losses: int = 0  # times that its server ended by itself
    num_sent_again: int = 0  # requests of lost servers, without output, that its next server got
    load_seconds: float = 0.0  # of all loads that worked
    last_load_seconds: float = 0.0
    wait_seconds: float = 0.0  # of all requests that waited for a load
    most_swaps_waited: int = 0  # loads of other models that began while a request waited for this one's
    life: asyncio.Task[None] | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names that requests may use now: the model's name first."""
        return (*self.served.names, *self.adapters)

    @property
    def has_one_waiting(self) -> bool:
        return len(self.tickets) + len(self.line_tickets) == 1

    def tell(self, stage: str, fraction: float) -> None:
        """Notes the load's progress."""
        self.stage, self.fraction = stage, fraction

    @property
    def answers_questions(self) -> bool:
        """True while the model's server answers questions. This includes a server that takes no new requests, because
        clients ask about running requests."""
        return self.state in (State.LOADED, State.CLOSING) and self.instance is not None

    @property
    def is_answering(self) -> bool:
        """False while the model's loaded server answers nothing."""
        return self.instance is None or self.instance.is_answering

    @property
    def progress_text(self) -> str:
        """Returns a text that says what a request for this model waits for."""
        match self.state:
            case State.LOADING:
                return f"loading: {self.stage or 'starting'} {self.fraction:.0%}"
            case State.CLOSING | State.STOPPING:
                return "waiting for the other models' turns"
            case State.LOADED:
                return "loaded" if self.is_answering else "waiting for its server to answer"
        return "waiting for memory" if self.may_need is not None else "looking at its file"

    def note_failure(self, reason: str, now: float) -> float:
        """Notes a failed load, and returns for how many seconds requests are refused because of it."""
        backoff: float = min(FIRST_BACKOFF_S * 2 ** min(self.failures, MAX_DOUBLINGS), MAX_BACKOFF_S)
        if (
            not self.served.is_resolved
        ):  # what it lacks may come without a change of the files that are looked at
            backoff = FIRST_BACKOFF_S
        self.failures += 1
        self.num_failures += 1
        self.failure, self.retry_at = reason, now + backoff
        return backoff

    def note_too_large(self, need: Memory, room: Memory, limit: str, *, is_beside_pinned: bool) -> None:
        """Notes that the model cannot be loaded, whichever other models are unloaded. limit: see
        `ModelLives.limit`."""
        self.is_too_large = True
        pinned = " beside the pinned models" if is_beside_pinned else ""
        more = "raise that limit, or " if limit else "raise --models-memory, or "
        if need.ram <= room.ram:  # it is GPU memory that is missing, which no setting raises
            limit = more = ""
        self.failure = (
            f"it needs {need.text()}, and {room.text()} can be had{pinned}{limit}: {more}lower its "
            "--max-model-len or --max-total-tokens"
        )

    def complete(self, needs: Needs) -> None:
        """Takes over the options that a look at the model's files has completed."""
        if not self.served.is_resolved:
            self.served = self.served.resolved(needs.completed)

    def forget_failure(self) -> None:
        """Lets the next request try again at once."""
        self.failure, self.retry_at, self.is_too_large = "", 0.0, False

    def refuse_waiting(self, error: ApiError) -> None:
        for tickets in (self.tickets, self.line_tickets):
            while tickets:
                ticket = tickets.popleft()
                if not ticket.future.done():
                    ticket.future.set_exception(error)

    def cannot_be_loaded(self, now: float) -> ApiError:
        """Returns the error for requests while the model cannot be loaded: 400 if it can never be loaded, 503 if it may
        be loaded later."""
        message = f"the model {self.name!r} cannot be loaded: {self.failure}"
        code = "model_too_large" if self.is_too_large else "model_load_failed"
        return ApiError(
            400 if self.is_too_large else 503,
            message,
            param="model",
            code=code,
            retry_after=max(1, round(self.retry_at - now)),
            refusal=Refusal.UNAVAILABLE,
        )


@dataclass(eq=False)
class Ticket:
    """A request, or a line of a batch, that waits for its model."""

    future: asyncio.Future[Instance]
    came: float
    swaps: int  # loads of all models when it began to wait

    @property
    def has_instance(self) -> bool:
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None
