"""A progress bar on a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedpdmc.run import Tick


class Display:
    """Shows process time, events per second, rounds, and the worst ESS and R-hat so far.

    Parameters
    ----------
    wanted : bool
        Whether the user wants one; it stays silent anyway when standard error is not a terminal.
    title : str
    status : callable, optional
        A few words on the sites.
    """

    def __init__(self, wanted: bool, title: str, status: Callable[[], str] | None = None):
        console = Console(stderr=True)
        self.visible = wanted and console.is_terminal
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self.visible,
        )
        self._task = self._bar.add_task(title, total=None, detail="compiling")
        self._quality, self._began, self._events = "", None, None
        self._status = status

    def __enter__(self) -> Display:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def tick(self, tick: Tick) -> None:
        """Show how far the slowest chain has come."""
        if self._began is None or self._events is None:
            self._began, self._events = tick.began, tick.events
            self._bar.reset(self._task, total=tick.until - tick.began)
        rate = (tick.events - self._events) / max(tick.seconds, 1e-9)
        self._events = tick.events
        gone, length = tick.time - self._began, tick.until - self._began
        detail = f"t = {gone:.4g} of {length:.4g}, {rate:,.0f} events/s, {tick.rounds:,} rounds{self._quality}"
        if self._status is not None and self.visible:
            detail += f"; {self._status()}"
        self._bar.update(self._task, completed=gone, total=length, detail=detail)

    def quality(self, worst_ess: float, worst_rhat: float) -> None:
        """Show the worst effective sample size and R-hat so far."""
        self._quality = f", worst ESS {worst_ess:,.0f}, R-hat {worst_rhat:.3f}"
