"""What the demo can fail with; the command line prints the text and exits with `exit_code`."""

from __future__ import annotations

from tokenpipe import ExitCode, TokenpipeError


class DemoError(TokenpipeError):
    """The demo cannot start or go on; the text says what was tried, what was found, what to do."""


class MissingExtraError(DemoError):
    """A package of the extra [demo] is not installed."""

    def __init__(self, package: str, needed_for: str) -> None:
        self.package = package
        self.needed_for = needed_for
        super().__init__(
            f"{needed_for}: the package {package} is not installed; "
            'install the demo extra: pip install "tokenpipe[demo]"'
        )


class ChildExitedError(DemoError):
    """A process of the demo ended before its time."""

    def __init__(self, role: str, pid: int, exit_code: int) -> None:
        self.role = role
        self.pid = pid
        # A code of the table is passed on: it says more than that something failed.
        is_told = exit_code in [code.value for code in ExitCode if code is not ExitCode.OK]
        self.exit_code = ExitCode(exit_code) if is_told else ExitCode.FAILED
        super().__init__(f"{role} (pid {pid}) exited with code {exit_code}")
