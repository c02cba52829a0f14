"""Names that cannot be guessed."""

import secrets

TICKET_BYTES = 16
EPOCH_BYTES = 8


def new_ticket() -> str:
    """The router's name for one hand-over: unguessable, never used twice."""
    return secrets.token_hex(TICKET_BYTES)


def new_epoch() -> str:
    """A fresh random id, drawn at every start of a daemon."""
    return secrets.token_hex(EPOCH_BYTES)
