"""Convert the errors of the hub's library into one sentence that says what to do."""

import errno

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ropewalk.model_runtime.errors import ModelError

_TOO_MANY_REQUESTS = 429
_UnusableCache = NotADirectoryError | PermissionError


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub gave no answer, or says that it cannot answer now."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status == _TOO_MANY_REQUESTS
    return not isinstance(error, HFValidationError | _UnusableCache)


def lookup_fault(error: Exception, model_id: str, revision: str | None) -> ModelError:
    """Return the sentence for an error before the download."""
    known = _known(error, model_id, revision)
    if known is not None:
        return ModelError(known)
    return ModelError(
        f"cannot reach the hub at {constants.ENDPOINT} for {model_id}, which is no folder here "
        f"({_short(error)}): check the network and HTTPS_PROXY, or copy the model into the cache "
        f"{constants.HF_HUB_CACHE} and set HF_HUB_OFFLINE=1"
    )


def download_fault(error: Exception, model_id: str, revision: str | None) -> ModelError:
    """Return the sentence for an error during the download."""
    cause = error.__cause__ if isinstance(error, EntryNotFoundError) else None
    if isinstance(cause, Exception):
        error = cause  # the library reports any failed request as a file that is not cached
    cache = constants.HF_HUB_CACHE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ModelError(
            f"the disk of {cache} became full while {model_id} was downloaded: free some space, or "
            "set HF_HOME to a folder on a larger disk"
        )
    known = _known(error, model_id, revision)
    return ModelError(
        known
        or f"the download of {model_id} from {constants.ENDPOINT} broke off ({_short(error)}): "
        f"start again, files that are complete stay in {cache}"
    )


def _known(error: Exception, model_id: str, revision: str | None) -> str | None:
    """Return a sentence for an answer of the hub; None if there was no answer."""
    if isinstance(error, HFValidationError):
        return f"there is no folder {model_id}, and a hub id is `name` or `owner/name`"
    if isinstance(error, _UnusableCache):
        return (
            f"cannot use the hub's cache {constants.HF_HUB_CACHE} ({error.strerror}: "
            f"{error.filename}): set HF_HOME to a folder that this user may write to"
        )
    if isinstance(error, GatedRepoError):
        token = "the token in use has no access" if get_token() else "there is no token"
        return (
            f"{model_id} is gated on the hub, and {token}: accept its terms at "
            f"{constants.ENDPOINT}/{model_id}, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"revision {revision or constants.DEFAULT_REVISION} of {model_id} does not exist on "
            "the hub: give a branch, a tag or a whole commit hash"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {model_id}, and the hub at {constants.ENDPOINT} has no such model "
            "for you: check the spelling, or set HF_TOKEN if it is private"
        )
    return _by_status(error, model_id) if isinstance(error, HfHubHTTPError) else None


def _by_status(error: HfHubHTTPError, model_id: str) -> str:
    status = error.response.status_code
    if status in {401, 403}:
        return (
            f"the hub at {constants.ENDPOINT} refuses access to {model_id} with status {status}: "
            "set HF_TOKEN to a valid token that may read it"
        )
    return f"the hub at {constants.ENDPOINT} answered {status} for {model_id}: try again later"


def _short(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
