"""Requests with pictures whose visual server or httpserver is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec

from moeserve.messages.pictures import EncodePicture
from moeserve.messages.schema import GenerateRequest, ProcessLost
from tests.support.pictures.picture_bodies import FILE, chat, image
from tests.support.pictures.visual_server import Answer, VisualServer, engine_sees, seeing_server
from tests.support.servers.http_harness import HttpServer, echo, silence
from tests.support.servers.waiting import within


def test_a_lost_visual_server(seeing: HttpServer, visual: VisualServer) -> None:
    """The next one gets the picture; the one that two were lost of fails."""

    def lose(times: int) -> Answer:
        def answer(picture: EncodePicture) -> msgspec.Struct:
            if len(visual.pictures) <= times:
                return ProcessLost("visualserver", "a test", by_itself=True)
            return visual.encoded(picture)

        return answer

    visual.answer = lose(1)
    assert seeing.post("/v1/chat/completions", chat(image())).status_code == 200
    assert [one.data for one in visual.pictures] == [FILE, FILE]
    visual.pictures, visual.answer = [], lose(2)
    answer = seeing.post("/v1/chat/completions", chat(image()))
    assert answer.status_code == 500
    assert "ended the process that encodes pictures, twice" in answer.json()["error"]["message"]
    assert len(visual.pictures) == 2


def test_files_of_a_lost_visual_server(seeing: HttpServer, visual: VisualServer) -> None:
    """Its last file, which it sent no answer about, is removed. The file that a prompt waits with stays, and so does
    the router's."""
    left: list[str] = []

    def lose_the_second(picture: EncodePicture) -> msgspec.Struct:
        answer = visual.encoded(picture)
        if len(visual.pictures) != 2:
            return answer
        left.extend([visual.files.link(answer.handle, 6 * 4 * 128), answer.handle])
        return ProcessLost("visualserver", "a test", by_itself=True)

    found: list[set[str]] = []

    def look(seeing: HttpServer, request: GenerateRequest) -> None:
        found.append(set(visual.left))
        echo(seeing, request)

    visual.answer, seeing.answer = lose_the_second, look
    assert seeing.post("/v1/chat/completions", chat(image(), image())).status_code == 200
    link, unanswered = left
    handles = [span.handle for span in seeing.requests[0].spans]
    assert unanswered not in handles
    assert found == [{link, *handles}]
    assert within(30, lambda: visual.left == [link])
    visual.files.remove(link)
    assert visual.pictures[1].id != visual.pictures[2].id


def test_files_of_a_killed_httpserver() -> None:
    """The next one removes them, and takes no answer to the last one's pictures for its own."""
    with seeing_server() as (seeing, visual):
        seeing.answer = silence
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(seeing.post, "/v1/chat/completions", chat(image()))
            assert within(30, lambda: len(seeing.requests) == 1)
            assert len(visual.left) == 1
            seeing.start_again()
            assert isinstance(asked.exception(30), httpx.RemoteProtocolError | httpx.ReadError)
        assert not visual.left
        engine_sees(seeing)
        seeing.answer = echo

        def answer(picture: EncodePicture) -> msgspec.Struct:
            seeing.send(visual.encoded(visual.pictures[0]))
            return visual.encoded(picture)

        visual.answer = answer
        assert seeing.post("/v1/chat/completions", chat(image())).status_code == 200
        assert visual.pictures[0].id != visual.pictures[1].id
        assert within(30, lambda: not visual.left)
