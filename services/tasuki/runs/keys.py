"""Names of settings in errors: the client's functions know fields, and a user of the command line the configuration's keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tasuki.wire.errors import InvalidArgument, PathNotFound, PathPermissionDenied


@contextmanager
def field_as_key(field: str, key: str) -> Iterator[None]:
    """Makes errors of the client's `field`, or of a field below it, name `key` of the configuration."""
    try:
        yield
    except InvalidArgument as error:
        wrong = error.metadata["field"]
        if wrong != field and not wrong.startswith(f"{field}."):
            raise
        problem = error.message.removeprefix(f"{wrong}: ")
        numbers = {name: value for name, value in error.metadata.items() if name != "field"}
        raise InvalidArgument(f"{key}{wrong.removeprefix(field)}", problem, **numbers) from error
    except PathNotFound as error:
        raise PathNotFound(f"{key}: {error.message.removeprefix(f'{field} ')}", **error.metadata) from error
    except PathPermissionDenied as error:
        raise PathPermissionDenied(f"{key}: {error.message.removeprefix(f'{field}: ')}", **error.metadata) from error
