"""The exceptions of this project."""

from __future__ import annotations


def printable(text: str) -> str:
    """Untrusted text on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def first_line(error: BaseException) -> str:
    """The first line of another library's exception, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip()[:200] if lines else type(error).__name__


class WisparseError(Exception):
    """Base class. ``exit_code``: of the command line."""

    exit_code = 1

    def __str__(self) -> str:
        # A message can quote untrusted text.
        return printable(super().__str__())


class UsageError(WisparseError):
    """Arguments that contradict each other or are out of range."""

    exit_code = 2


class CalibrationError(UsageError):
    """A calibration source that is missing, empty, binary or too short."""


class PromptError(UsageError):
    """A prompt that no answer can follow, as it has no tokens."""


class ContextLengthError(PromptError):
    """A prompt that does not fit the model's context."""


class UnsupportedModelError(WisparseError):
    """A model with an unsupported architecture, quantisation or setting."""

    exit_code = 3


class AccessError(WisparseError):
    """A model or repository that does not exist, is gated, or cannot be reached."""

    exit_code = 4


class ResourceError(WisparseError):
    exit_code = 5


class UnavailableError(ResourceError):
    """The server cannot answer now; the same request may succeed later."""


class BundleError(WisparseError):
    """A bundle that is damaged, inconsistent, hostile, or of a newer format."""

    exit_code = 6


class UploadError(WisparseError):
    """An upload that failed after the bundle was written; the bundle is kept."""

    exit_code = 7
