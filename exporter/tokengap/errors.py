"""The errors tokengap raises on purpose, and whose fault each one is.

::

    TokengapError
    +-- SettingsError     the user's: a setting is unknown or wrong            exit 2
    +-- SetupError        the host's: a part is missing, a port is taken       exit 2
    +-- SourceError       the watched system's: a source could not be read     never ends the process
        +-- SourceRefused     nobody listens there, or the kernel said no
        +-- SourceTimeout     no answer within the deadline
        +-- SourceUnusable    an answer that is not what this source reads
"""


class TokengapError(Exception):
    """Base of every error that is shown to a person as one line."""


class SettingsError(TokengapError):
    """A setting is unknown or wrong. The message names where it stands, the key, the value and what is expected."""


class SetupError(TokengapError):
    """This host lacks something that was asked for. The message says what and how to get it."""


class SourceError(TokengapError):
    """A source could not be read in this beat. ``str()`` is the reason, one line, shown on the page of sources."""


class SourceRefused(SourceError):
    """Nobody listens there (connection refused, no route), or the kernel does not permit the read."""


class SourceTimeout(SourceError):
    """No answer within the deadline."""


class SourceUnusable(SourceError):
    """An answer came, but it is not what this source reads (5xx, empty, too large, not text, malformed)."""
