"""A sampling parameter is declared once: a toy parameter in parameters.py alone reaches all that follows from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moeserve.sampling import parameters
from moeserve.sampling.parameters import DEFAULTS, PARAMETERS, SamplerSettings

SOURCE = Path(parameters.__file__)
REPOSITORY = SOURCE.parents[2]
TOY = """\
    toy_share: Annotated[
        float,
        Parameter(
            "A toy.",
            _SHARE,
            "float64",
            "top_p",
            ("openai", "llama_server", "ollama"),
            names={"ollama": "toy"},
            ranges={"ollama": Range(0, 0.5)},
            gguf="toy_share",
        ),
    ] = 0.25


def _declared("""
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("moeserve.sampling.parameters", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)

import msgspec
from pydantic import ValidationError
from moeserve.config import ServerConfig
from moeserve.httpserver.app import openapi_document
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.sampling_defaults import sampling_defaults
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.llama_server.bodies import CompletionBody
from moeserve.httpserver.llama_server.objects import sampler_object
from moeserve.httpserver.ollama.bodies import ChatBody
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.messages.sampling import SamplingParams
sys.path.insert(0, "scripts")
from sampling_reference import sampling_page

def frozen(body):
    asked = body.asked(Caller(0.0))
    resolved = Resolved(asked, sampler=asked.sampler)
    params = resolved.sampling(max_tokens=1, seed=0, stop_token_ids=(), scores_prompt=False)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams), asked.chosen

HI = [{"role": "user", "content": "Hi"}]
params, chosen = frozen(ChatCompletionRequest(messages=HI, toy_share=0.75))
assert (params.toy_share, chosen) == (0.75, {"toy_share"})
params, chosen = frozen(CompletionBody(prompt="Hi"))
assert (params.toy_share, chosen) == (0.25, set())
assert sampler_object(params)["toy_share"] == 0.25
params, chosen = frozen(ChatBody(model="m", messages=HI, options={"toy": 0.5}))
assert (params.toy_share, chosen) == (0.5, {"toy_share"})
for model, body in ((ChatCompletionRequest, {"messages": HI, "toy_share": 1.1}),
                    (ChatBody, {"model": "m", "messages": HI, "options": {"toy": 0.6}})):
    try:
        model(**body)
    except ValidationError as error:
        assert "toy" in str(error)
    else:
        raise AssertionError(body)
defaults = sampling_defaults(ServerConfig(override_generation_config='{"toy_share": 0.5}'), {})
assert defaults.settings == {"toy_share": 0.5}
config = ServerConfig(generation_config="auto")
assert sampling_defaults(config, {"general.sampling.toy_share": 1}).settings == {"toy_share": 1.0}
assert "toy_share" in openapi_document()["components"]["schemas"]["CompletionBody"]["properties"]
assert sum("`toy_share`" in line for line in sampling_page()) == 2
"""


def test_one_declaration_is_all_that_apis_wire_defaults_and_documents_need(tmp_path: Path) -> None:
    declaration = tmp_path / "parameters.py"
    declaration.write_text(SOURCE.read_text().replace("\n\ndef _declared(", TOY, 1))
    assert "toy_share" in declaration.read_text()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, declaration],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr


def test_defaults_are_within_every_apis_range_or_have_one_of_their_own() -> None:
    for name, parameter in PARAMETERS.items():
        for api in parameter.apis:
            assert parameter.defaults.get(api, getattr(DEFAULTS, name)) in parameter.range_in(api), (
                name,
                api,
            )
        assert set(parameter.names) | set(parameter.ranges) | set(parameter.notes) <= set(parameter.apis), (
            name
        )
        assert parameter.detail_of in ("", *PARAMETERS)


def test_every_field_is_declared() -> None:
    assert tuple(PARAMETERS) == SamplerSettings.__struct_fields__


def test_a_parameter_is_named_in_ten_files_that_are_written_by_hand() -> None:
    name = "xtc_" + "probability"  # so that this one is none of them
    kinds = {".py", ".pyi", ".h", ".cpp", ".inl", ".md", ".js", ".html", ".toml", ".txt"}
    folders = ("moeserve", "scripts", "docs", "tests")  # benchmarks measure what they choose
    files = (path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in kinds)
    texts = {path.relative_to(REPOSITORY): path.read_text() for path in files}
    found = [
        path for path, text in texts.items() if name in text and "Made by scripts/generate_docs" not in text
    ]
    product = [path for path in found if path.parts[0] == "moeserve"]
    assert len(product) == 5, product
    assert len(found) <= 10, found
