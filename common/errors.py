"""One root and five families of errors, grouped by what the caller does about them.

A message gives the values and the next step, for the people of the machine it
happens on. What another party may be told is said separately and is a fixed text:
a message may name a site's files or quote its policy.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Root of every error this project raises on purpose.

    Args:
        message: for the local log and the local person.
        public: a fixed text that may cross to another party; empty for nothing but the class.
    """

    def __init__(self, message: str, *, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class ConfigError(HeadwaterError):
    """The settings, model or machine cannot work: stop and tell the person (exit code 2)."""


class PrivacyError(HeadwaterError):
    """A privacy guarantee would break: refuse; nothing leaves, nothing is charged twice."""


class TrustError(HeadwaterError):
    """A signature, digest, key or file mode does not hold: reject what was received."""


class RoundError(HeadwaterError):
    """One site's part of a round is unusable: skip that site, the round goes on."""


class TransportError(HeadwaterError):
    """Disk or network failed in passing: retry later, nothing was lost."""
