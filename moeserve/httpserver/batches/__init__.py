"""OpenAI's files and batches, and Anthropic's message batches; one runner answers both. Off without --batch-dir."""

from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.httpserver.batches import batch_routes, file_routes, message_batch_routes
from moeserve.httpserver.batches.bodies import CreateBatchRequest, CreateMessageBatchRequest, UploadFileForm
from moeserve.httpserver.batches.file_routes import MAX_UPLOAD_BYTES
from moeserve.httpserver.batches.message_batch_input import MAX_BATCH_BYTES
from moeserve.httpserver.batches.queries import API_NAME, NoBatches
from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.transport.api_table import Api, ApiState


def open_store(config: ServerConfig) -> BatchStore | None:
    """Returns the store for --batch-dir; None without. Raises ConfigError if the folder cannot be used."""
    if config.batch_dir is None:
        return None
    return BatchStore(Path(config.batch_dir), int(config.batch_dir_gib * GIB))


def _open_state(config: ServerConfig) -> ApiState:
    return open_store(config) or NoBatches()


API = Api(
    name=API_NAME,
    routers=(file_routes.router, batch_routes.router, message_batch_routes.router),
    bodies=(UploadFileForm, CreateBatchRequest, CreateMessageBatchRequest),
    uploads={"/v1/files": MAX_UPLOAD_BYTES, message_batch_routes.PATH: MAX_BATCH_BYTES},
    open_state=_open_state,
)
