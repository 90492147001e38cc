# SPDX-License-Identifier: Apache-2.0
"""Building Debian images from an archive that lacks what is asked for: a real mmdebstrap, an archive of our own."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from libdsec import Client
from libdsec.errors import BackendFailed, InvalidSpec
from libdsec.types import BuildDebianRequest
from tests.support.daemon import Daemon


class _Empty(http.server.BaseHTTPRequestHandler):
    """An archive without any suite."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Daemon() as daemon, daemon.client() as connected:
        yield connected


@pytest.fixture
def archive() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/debian"
    server.shutdown()
    thread.join()
    server.server_close()


def build(client: Client, **more: object) -> None:
    client.finish(client.image_build_debian(BuildDebianRequest.model_validate(more)))


def test_a_suite_that_is_not_there_is_an_error_of_the_request(client: Client, archive: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        build(client, suite="nosuch", mirror=archive)
    assert caught.value.message == f"build Debian 'nosuch': {archive} has no such suite"
    assert caught.value.hint == "name one that it has, such as trixie or bookworm; --mirror names another archive"
    assert client.images().images == ()


def test_an_archive_that_cannot_be_reached_is_named(client: Client, archive: str) -> None:
    nobody = archive.replace("/debian", "")[: archive.rindex(":")] + ":1/debian"
    with pytest.raises(BackendFailed, match="^build Debian 'trixie': Failed to fetch") as caught:
        build(client, suite="trixie", mirror=nobody)
    assert caught.value.hint == f"see that this host reaches {nobody}, through a proxy if it needs one"
    assert caught.value.retryable
    assert client.images().images == ()
