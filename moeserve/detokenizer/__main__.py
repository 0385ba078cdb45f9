"""`python -m moeserve.detokenizer`: the detokenizer process, started by the launcher."""

from __future__ import annotations

from pathlib import Path

from moeserve.detokenizer.detokenize_tracer import DetokenizeTracer
from moeserve.detokenizer.manager import Detokenizer, serve
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.codec import TO_DETOKENIZER
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.processes.lifecycle import Process, run_process
from moeserve.tokenizer import Vocabulary


def read_vocabulary(model: Path) -> Vocabulary:
    """Returns the vocabulary of a served model, read from its files. Raises ModelError for files that cannot be served.

    The worker also checks the file, but seconds later, because it imports torch first. This process reads the header
    anyway, so a wrong file ends the start at once.
    """
    source = open_metadata(model)
    read_checked_shape(source)
    return Vocabulary.from_gguf(source)


def main(process: Process, vocabulary: Vocabulary | None = None) -> None:
    """Runs the detokenizer. vocabulary: the model's, if it was read before this process was forked."""
    inbox = PullChannel(process.context, process.paths.detokenizer, TO_DETOKENIZER)
    to_router = PushChannel(process.context, process.paths.router)
    to_http = PushChannel(process.context, process.paths.http)
    vocabulary = vocabulary or read_vocabulary(Path(process.config.model))
    process.ready()
    detokenizer = Detokenizer(vocabulary.token_bytes, vocabulary.special)
    tracer = DetokenizeTracer.wanted(process.tracer)
    serve(detokenizer, inbox, to_router, to_http, tracer, process.heartbeat)


if __name__ == "__main__":
    run_process("detokenizer", main)
