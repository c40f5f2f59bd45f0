"""Errors that Esper raises on purpose: messages say what was wrong, what was expected and what to do."""


class EsperError(Exception):
    """Base of every error Esper raises for a reason the caller can act on."""


class InvalidStateMachineError(EsperError):
    """A lifecycle operation that the seed's stage, gates or parameters do not allow."""


class StateFormatError(EsperError):
    """A saved population that cannot be read: wrong schema, wrong shape or not a population at all."""
