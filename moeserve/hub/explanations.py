"""Translates errors of the hub and its client library into a message with the cause and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import ANOTHER_CACHE, HubError
from .names import HubName

# Variables by which the library chooses a proxy.
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Raises a HubError in the place of what the library raises."""
    hub = address()
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{name}: access has to be granted; ask for it at {hub}/{name.repo}, then set HF_TOKEN to a token of yours"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{name}: {hub}/{name.repo} has no branch, tag or commit {name.revision}; correct what follows @"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: neither a local path nor a repository that {hub} shows to this user; check the name, or set "
            "HF_TOKEN if it "
            "is private"
        ) from error
    except HfHubHTTPError as error:
        raise HubError(f"{name}: {_answer(error)}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        cause = error.__cause__  # of a file that was asked for and is not in the cache
        why = _answer(cause) if isinstance(cause, HfHubHTTPError) else why_unanswered(cause)
        raise not_here(name, f"only the cache is there: {why}") from error
    except httpx2.TransportError as error:
        raise HubError(
            f"{name}: the connection to {hub} failed ({error}); what was downloaded is "
            "kept: run the same command again to continue"
        ) from error
    except httpx2.TooManyRedirects as error:
        raise not_a_hub(str(name)) from error
    except ImportError as error:
        if "SOCKS" not in str(error):
            raise
        raise HubError(
            f"{name}: a SOCKS proxy is set ({', '.join(one for one in _PROXIES if os.environ.get(one))}), which needs "
            "one more package: pip install socksio; or name an HTTP proxy"
        ) from error
    except UnicodeEncodeError as error:  # of a header, the only text that is sent in ASCII
        raise HubError(f"{name}: HF_TOKEN has characters that no token has; copy it again") from error
    except (HFValidationError, OSError) as error:
        raise _disk_error(name, error) from error


def address() -> str:
    """Returns the hub's address, without a password in it."""
    url = httpx2.URL(constants.ENDPOINT)
    return f"{_host(url)}{url.path.rstrip('/')}" if url.userinfo else constants.ENDPOINT


def _host(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode()}"


def _answer(error: HfHubHTTPError) -> str:
    """Returns who answered what, and the remedy: files may come from another host than the hub."""
    response = error.response
    return f"{_host(response.request.url)} answered with status {response.status_code}; {_remedy(response)}"


def _remedy(response: httpx2.Response) -> str:
    """Says what to do about an error's status."""
    if response.status_code == httpx2.codes.TOO_MANY_REQUESTS:
        wait = response.headers.get("Retry-After", "")
        after = f"after {wait} s" if wait.isdecimal() else "in a few minutes"
        more = "" if get_token() else ", or set HF_TOKEN, with which more are allowed"
        return f"too many requests came from here: try again {after}{more}"
    if response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        at_hub = response.request.url.netloc == httpx2.URL(constants.ENDPOINT).netloc
        return "check HF_TOKEN" if at_hub else "the network's proxy or firewall has to allow that host"
    return "try again later"


def not_here(name: HubName, why: str) -> HubError:
    return HubError(
        f"{name}: neither a local path nor in {constants.HF_HUB_CACHE}, and {why}, or name a local file"
    )


def not_a_hub(what: str) -> HubError:
    return HubError(f"{what}: {address()} does not answer as a hub does; check HF_ENDPOINT")


def why_unanswered(error: BaseException | None) -> str | None:
    """Returns why the hub does not tell what it has, and the remedy. None: it does, and `error` is its answer."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status < 500 and status != httpx2.codes.TOO_MANY_REQUESTS:
            return None
        return _answer(error)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):  # in many companies a proxy encrypts anew
        return (
            f"the certificate of {address()} is not trusted ({error}); name the authority's file, perhaps "
            "your company's, in SSL_CERT_FILE"
        )
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set; unset it"
    to_check = ["the network", "HF_ENDPOINT", *(name for name in _PROXIES if os.environ.get(name))]
    return f"{address()} cannot be reached; check {', '.join(to_check[:-1])} and {to_check[-1]}"


def _disk_error(name: HubName, error: Exception) -> HubError:
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        return HubError(f"{name}: {error.filename}: {error.strerror}; {ANOTHER_CACHE}")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return HubError(
            f"{name}: {constants.HF_HUB_CACHE}: {error.strerror}; what was downloaded is kept: make room and run the "
            "same command again, or put the cache elsewhere (HF_HUB_CACHE)"
        )
    return HubError(f"{name}: {error}")
