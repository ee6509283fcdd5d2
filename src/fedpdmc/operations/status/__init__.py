"""The status of a running study for its operator: status values, HTML page, Prometheus metrics and stall reports."""

from fedpdmc.operations.status.board import CoordinatorBoard, SiteBoard
from fedpdmc.operations.status.watch import Watching, watched

__all__ = ["CoordinatorBoard", "SiteBoard", "Watching", "watched"]
