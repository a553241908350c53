"""One root and five families of errors, grouped by what the caller does about them.

A message gives the values and the next step. `None` of these ever carries
customer text, keys or update values: an error message may cross a process.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Root of every error this project raises on purpose."""


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
